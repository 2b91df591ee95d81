#include "worker/units/unit.h"

#include "shared/job/validate.h"
#include "shared/telemetry/metrics.h"
#include "worker/model_set.h"
#include "worker/units/request.h"

namespace ditfleet::worker {

std::string Unit::label() const {
  constexpr std::size_t kTraceAt = 3, kTraceLength = 32;  // "00-<trace>-<span>-<flags>"
  std::string label = entry.ref.job + "/" + std::to_string(entry.ref.unit);
  // What a client wrote there may be anything.
  if (telemetry::is_valid_traceparent(entry.traceparent))
    label += " [trace " + entry.traceparent.substr(kTraceAt, kTraceLength) + "]";
  return label;
}

Result<std::shared_ptr<Unit>> make_unit(queue::MailboxEntry entry, const ModelSet& models, Clock::time_point now) {
  auto parsed = job::parse_spec(entry.spec);
  if (!parsed) return parsed.error();
  const auto model = models.models.find(parsed->model);
  if (model == models.models.end()) {
    std::string held;
    for (const auto& [name, unused] : models.models) held += (held.empty() ? "" : ", ") + name;
    return Error{Code::kNotFound, "this worker does not hold the model '" + parsed->model + "', it holds " + held,
                 "model"};
  }
  // A seed drawn here would give each attempt another picture.
  if (!parsed->seed) return invalid_argument("a spec that reaches a worker has a seed", "seed");
  auto complete = job::complete_spec(std::move(*parsed), models.catalogue);
  if (!complete) return complete.error();
  if (entry.ref.unit < 0 || entry.ref.unit >= *complete->n) {
    return invalid_argument("unit " + std::to_string(entry.ref.unit) + " is not one of the job's " +
                            std::to_string(*complete->n));
  }
  auto unit = std::make_shared<Unit>();
  unit->entry = std::move(entry);
  unit->spec = std::move(*complete);
  unit->request = request_of(unit->spec, unit->entry.ref.unit);
  unit->preview_steps = preview_steps(static_cast<int>(unit->spec.fields.integer("num_inference_steps").value()),
                                      unit->spec.partial_images);
  unit->model = model->second.get();
  unit->received = now;
  return unit;
}

}  // namespace ditfleet::worker
