// Converts a job's spec to and from JSON. No side effects; thread-safe.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shared/core/json.h"
#include "shared/core/result.h"
#include "shared/job/object_reader.h"
#include "shared/job/spec.h"

namespace ditfleet::job {

// Largest text of a spec. Canonical and complete forms are far smaller, because the field table bounds every field.
inline constexpr std::size_t kMaxSpecBytes = 1u << 20;

// Parses the body of POST /v1/jobs or the `spec` of an intake entry.
// kInvalidArgument (`param` is the field): an unknown field (the message suggests the nearest field), a wrong type,
// invalid UTF-8, or a value outside the bounds of the field table. kPayloadTooLarge: longer than kMaxSpecBytes.
Result<JobSpec> parse_spec(std::string_view json_text);
Result<JobSpec> parse_spec(const json::value& body);
// Without these overloads, strings and literals would also convert to json::value.
inline Result<JobSpec> parse_spec(const std::string& json_text) { return parse_spec(std::string_view(json_text)); }
inline Result<JobSpec> parse_spec(const char* json_text) { return parse_spec(std::string_view(json_text)); }

// Reads the field `loras` of an object. An error is the reader's.
std::vector<LoraUse> read_loras(ObjectReader& reader);

// The JSON form of a value of type kCache.
std::string cache_json(double threshold);

// Parses a spec from complete_spec. Also returns kInvalidArgument if it has no model, n, seed, output_format,
// output_compression or adapter digest.
Result<JobSpec> parse_complete_spec(std::string_view json_text);

// Canonical JSON: fields in the order of the table, without unset fields. parse_spec can parse it.
std::string to_json(const JobSpec& spec);

}  // namespace ditfleet::job
