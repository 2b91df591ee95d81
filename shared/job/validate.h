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

// Returns the digest of the adapter that a request for this model names. An error if the tenant may not use the
// adapter, or if the request gives another digest; its param, if empty, becomes the adapter's name.
using AdapterResolver = std::function<Result<std::string>(const LoraUse& use, const ModelEntry& model)>;

// Checks the spec against its model and sets every unset field that has a default, the digest of each adapter included.
// A missing seed is drawn here, once, so that every attempt yields the same image. Without `resolve` each adapter must
// have its digest.
// Errors: kNotFound (unknown model; the message lists the known ones), kInvalidArgument (a field that does not apply to
// the model or is outside its limits), and those of `resolve`. `param` is the field.
Result<JobSpec> complete_spec(JobSpec spec, const Catalogue& catalogue, const AdapterResolver& resolve = {});

}  // namespace ditfleet::job
