// Turns an intake entry into an admission or a rejection. Parses and completes the spec again, because an entry may
// come from a plain XADD, then classifies and prices it.
//
// Pure functions. They do not throw.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <variant>

#include "shared/core/result.h"
#include "shared/job/catalogue.h"
#include "shared/job/shape_class.h"
#include "shared/job/spec.h"
#include "shared/queue/types.h"

namespace ditfleet::scheduling {

// A complete spec, classified.
struct Classified {
  job::JobSpec spec;
  std::string class_key;
  job::ShapeClass shape;
  std::int64_t tokens = 0;    // of a forward pass
  std::int64_t prior_us = 0;  // of one unit (cost_model.h)
};

// Precondition: complete_spec made `spec` with `model`.
Classified classify(job::JobSpec spec, const job::ModelEntry& model, const std::string& precision);

// Resolves the name of a tenant's adapter to its digest, or returns an error if the tenant has no such adapter for the
// model. Unset: no tenant has adapters.
using TenantAdapters = std::function<Result<std::string>(const std::string& tenant, const job::LoraUse& use,
                                                         const job::ModelEntry& model)>;

// Parses, completes and classifies an entry. Errors: those of job/validate.h, and a malformed entry.
Result<Classified> examine(const queue::IntakeEntry& entry, const job::Catalogue& catalogue,
                           const std::string& precision, const TenantAdapters& adapters);

// A lower bound of the time until a unit ends.
struct Estimate {
  std::int64_t wait_us = 0, run_us = 0;
  bool observed = false;  // the run is based on observed runs of the model
};

// The deadline of a job in microseconds of Redis' clock; 0: none.
std::int64_t deadline_us(const queue::IntakeEntry& entry, const job::JobSpec& spec);

// An error if the deadline cannot be met. A prior alone never rejects a job.
std::optional<Error> unmet_deadline(const Estimate& estimate, std::int64_t deadline_us, std::int64_t now_us);

// An error if the job lists more adapters than `most_slots`, the most adapter slots of any worker. 0 or less: unknown.
std::optional<Error> unmet_slots(const job::JobSpec& spec, int most_slots);

// An error if the job needs more memory than the model has on `worker`, the one that can hold the most.
std::optional<Error> unmet_memory(const Classified& job, const std::string& worker, const queue::ModelMemory& most);

std::string with_commas(std::int64_t number);  // 1,572,864

std::vector<std::string> adapters_of(const job::JobSpec& spec);  // digests in the order of the request
queue::Admission make_admission(const queue::IntakeEntry& entry, const Classified& job, std::int64_t cost_us);
queue::Rejection make_rejection(const queue::IntakeEntry& entry, Error error);

}  // namespace ditfleet::scheduling
