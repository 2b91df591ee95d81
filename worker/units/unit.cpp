#include "worker/units/unit.h"

#include <algorithm>

#include "shared/job/spec_json.h"
#include "worker/models/model_set.h"
#include "worker/models/request.h"

namespace ditfleet::worker {

std::string Unit::label() const { return entry.ref.job + "/" + std::to_string(entry.ref.unit); }

telemetry::SpanContext Unit::context() const {
  return span.context().valid() ? span.context() : telemetry::SpanContext::parse(entry.traceparent);
}

Result<std::shared_ptr<Unit>> make_unit(queue::MailboxEntry entry, const ModelSet& models, Clock::time_point now) {
  auto spec = job::parse_complete_spec(entry.spec);
  if (!spec) return spec.error();
  const auto model = models.models.find(spec->model);
  if (model == models.models.end()) {
    std::string held;
    for (const auto& [name, unused] : models.models) held += (held.empty() ? "" : ", ") + name;
    return Error{Code::kNotFound, "this worker does not have the model '" + spec->model + "'; it has " + held, "model"};
  }
  if (entry.ref.unit < 0 || entry.ref.unit >= *spec->n) {
    return invalid_argument("unit " + std::to_string(entry.ref.unit) + " is out of range: the job has " +
                            std::to_string(*spec->n) + " units");
  }
  auto unit = std::make_shared<Unit>();
  unit->entry = std::move(entry);
  unit->spec = std::move(*spec);
  unit->request = request_of(unit->spec, unit->entry.ref.unit);
  unit->preview_steps = preview_steps(job::steps_of(unit->spec.fields), unit->spec.partial_images);
  if (const int step = unit->spec.pause_after_steps.value_or(0); step > 0) {
    auto& steps = unit->preview_steps;
    const auto at = std::lower_bound(steps.begin(), steps.end(), step);
    if (at == steps.end() || *at != step) steps.insert(at, step);
  }
  unit->model = model->second.get();
  if (const auto known = models.receipts.find(unit->spec.model); known != models.receipts.end())
    unit->receipt_of_model = known->second;
  unit->gpus = models.gpus;
  unit->received = now;
  return unit;
}

}  // namespace ditfleet::worker
