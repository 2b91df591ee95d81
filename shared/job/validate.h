// From untrusted JSON to a complete, valid JobSpec, and back. Used at every edge where a job enters
// (gateway routes, intake entries) and by workers on what they are assigned.
// Pure functions, thread safe.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "shared/core/json.h"
#include "shared/core/result.h"
#include "shared/job/catalogue.h"
#include "shared/job/spec.h"

namespace ditfleet::job {

// How long a job may be where it enters: over HTTP in canonical form, by XADD as it is.
inline constexpr std::size_t kMaxSpecBytes = 1u << 20;
// And on its way: its canonical form is longer than a body that says `size`, its complete form longer still (a seed, a
// digest for each adapter). What was acknowledged must be read by everyone behind.
inline constexpr std::size_t kMaxStoredSpecBytes = kMaxSpecBytes + (64u << 10);

// Body of POST /v1/jobs and of an intake entry's `spec`, of at most kMaxStoredSpecBytes: else kPayloadTooLarge. Unknown
// fields, wrong types, invalid UTF-8 and values outside the service's absolute limits are kInvalidArgument with `param`
// set and, for an unknown field, the nearest known one in the message.
Result<JobSpec> parse_spec(std::string_view json_text);
Result<JobSpec> parse_spec(const json::value& body);
// Text converts to a json::value as well; it is meant as JSON text here.
inline Result<JobSpec> parse_spec(const std::string& json_text) { return parse_spec(std::string_view(json_text)); }
inline Result<JobSpec> parse_spec(const char* json_text) { return parse_spec(std::string_view(json_text)); }

// The digest of the adapter that a request for this model names; an error (its param is filled in if empty) if it must
// not be used, or is not the one whose digest the request gives.
using AdapterResolver = std::function<Result<std::string>(const LoraUse& use, const ModelEntry& model)>;

// Checks against the catalogue (unknown model → kNotFound with the known names; size not a multiple of
// the model's, outside its limits; steps; sequence length) and fills every unset field, also the digest of each
// adapter. A missing seed is drawn here. Without `resolve` adapters must have their digests, as in a spec that reached
// a worker.
Result<JobSpec> complete_spec(JobSpec spec, const Catalogue& catalogue, const AdapterResolver& resolve = {});

// Canonical JSON: fixed field order, defaults left out only where unset. parse_spec reads it back.
std::string to_json(const JobSpec& spec);

}  // namespace ditfleet::job
