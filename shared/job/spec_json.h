// A job's spec as JSON, in both directions. Pure functions, thread safe.
#pragma once

#include <string>
#include <string_view>

#include "shared/core/json.h"
#include "shared/core/result.h"
#include "shared/job/spec.h"

namespace ditfleet::job {

// Largest job that a client may send: in canonical form over HTTP, as it is by XADD.
inline constexpr std::size_t kMaxSpecBytes = 1u << 20;
// Largest spec that is read. The canonical form of a job may be longer than its body, and the complete form adds a seed
// and a digest per adapter. Everyone must be able to read what was acknowledged.
inline constexpr std::size_t kMaxStoredSpecBytes = kMaxSpecBytes + (64u << 10);

// The body of POST /v1/jobs and the `spec` of an intake entry. An unknown field, a wrong type, invalid UTF-8 or a value
// outside the table's bounds is kInvalidArgument with `param` set; the message about an unknown field suggests the
// nearest known one. A text longer than kMaxStoredSpecBytes is kPayloadTooLarge.
Result<JobSpec> parse_spec(std::string_view json_text);
Result<JobSpec> parse_spec(const json::value& body);
// These texts convert to json::value, too; they mean JSON text.
inline Result<JobSpec> parse_spec(const std::string& json_text) { return parse_spec(std::string_view(json_text)); }
inline Result<JobSpec> parse_spec(const char* json_text) { return parse_spec(std::string_view(json_text)); }

// The same for a spec that complete_spec has filled, without a catalogue. kInvalidArgument names the field that a
// complete spec lacks: model, n, seed, output_format, output_compression or an adapter's digest.
Result<JobSpec> parse_complete_spec(std::string_view json_text);

// Canonical JSON: the table's order, unset fields left out. parse_spec reads it back.
std::string to_json(const JobSpec& spec);

}  // namespace ditfleet::job
