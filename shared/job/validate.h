// Turns a parsed spec into a valid, complete spec. The gateway and the scheduler's intake use it.
// No side effects; thread-safe.
#pragma once

#include <functional>
#include <string>

#include "shared/core/result.h"
#include "shared/job/catalogue.h"
#include "shared/job/spec.h"
#include "shared/job/spec_json.h"

namespace ditfleet::job {

// Returns the digest of an adapter for a request for this model. Fails if the tenant may not use the adapter, or if the
// request has another digest. If the error has no param, complete_spec sets param to the field of the adapter's name.
using AdapterResolver = std::function<Result<std::string>(const LoraUse& use, const ModelEntry& model)>;

// Checks the spec against its model and sets all unset fields that the preset or the model sets, and the digest of each
// adapter. Adapters of the preset are added, except those that the spec already names. Idempotent.
// Draws a missing seed, so that every attempt generates the same image. Without `resolve`, every adapter must have a
// digest. Errors: kNotFound (unknown model; the message lists the known ones), kInvalidArgument (an unknown preset; the
// message lists the model's), kInvalidArgument (a field that does not apply to the model or is outside its limits), and
// those of `resolve`. `param` is the field.
Result<JobSpec> complete_spec(JobSpec spec, const Catalogue& catalogue, const AdapterResolver& resolve = {});

// For a job that goes on from the checkpoint of a unit of another one, whose spec `from` is complete. inherit() sets
// what `spec` leaves out. check_branch() returns why the complete spec cannot go on from there; nothing if it can.
void inherit(JobSpec& spec, const JobSpec& from, int unit);
std::optional<Error> check_branch(const JobSpec& spec, const JobSpec& from);

}  // namespace ditfleet::job
