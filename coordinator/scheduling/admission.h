// From an intake entry to an admission or a rejection: the spec is parsed and completed again (an entry may
// have come by a plain XADD), classified and priced.
//
// Pure; throws nothing.
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
  std::int64_t prior_us = 0;  // of one unit (cost_model.h)
};

// Precondition: complete_spec made `spec` with `model`.
Classified classify(job::JobSpec spec, const job::ModelEntry& model, const std::string& precision);

// The digest of an adapter that this tenant names for this model; an error where there is none. Unset: there are no
// adapters.
using TenantAdapters = std::function<Result<std::string>(const std::string& tenant, const job::LoraUse& use,
                                                         const job::ModelEntry& model)>;

// What is wrong with the entry itself or its spec, in the words of job/validate.h.
Result<Classified> examine(const queue::IntakeEntry& entry, const job::Catalogue& catalogue,
                           const std::string& precision, const TenantAdapters& adapters);

// When a unit would be through, as far as can be told.
struct Estimate {
  std::int64_t wait_us = 0, run_us = 0;
  bool observed = false;  // the run is corrected by runs of this model, not only a prior
};

// The deadline of a job in microseconds of Redis' clock; 0: none.
std::int64_t deadline_us(const queue::IntakeEntry& entry, const job::JobSpec& spec);

// An error if the deadline can't be met. A prior alone never turns a job away.
std::optional<Error> unmet_deadline(const Estimate& estimate, std::int64_t deadline_us, std::int64_t now_us);

// An error if the job names more adapters than the widest worker that was seen holds at once; 0 or less: nobody knows
// yet.
std::optional<Error> unmet_slots(const job::JobSpec& spec, int most_slots);

std::vector<std::string> adapters_of(const job::JobSpec& spec);  // digests, in the order of the request
queue::Admission make_admission(const queue::IntakeEntry& entry, const Classified& job, std::int64_t cost_us);
queue::Rejection make_rejection(const queue::IntakeEntry& entry, Error error);

}  // namespace ditfleet::scheduling
