// From a parsed spec to a complete, valid one. Used wherever a job enters: gateway routes and intake entries.
// Pure functions, thread safe.
#pragma once

#include <functional>
#include <string>

#include "shared/core/result.h"
#include "shared/job/catalogue.h"
#include "shared/job/spec.h"
#include "shared/job/spec_json.h"

namespace ditfleet::job {

// The digest of the adapter that a request for this model names; an error (its param is filled in if empty) if it must
// not be used, or is not the one whose digest the request gives.
using AdapterResolver = std::function<Result<std::string>(const LoraUse& use, const ModelEntry& model)>;

// Checks against the catalogue (unknown model → kNotFound with the known names; size not a multiple of
// the model's, outside its limits; steps; sequence length) and fills every unset field, also the digest of each
// adapter. A missing seed is drawn here. Without `resolve` adapters must have their digests, as in a spec that reached
// a worker.
Result<JobSpec> complete_spec(JobSpec spec, const Catalogue& catalogue, const AdapterResolver& resolve = {});

}  // namespace ditfleet::job
