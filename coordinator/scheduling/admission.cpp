#include "coordinator/scheduling/admission.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "coordinator/scheduling/placement/cost_model.h"
#include "shared/job/validate.h"

namespace ditfleet::scheduling {
Classified classify(job::JobSpec spec, const job::ModelEntry& model, const std::string& precision) {
  Classified out;
  out.shape = job::shape_class_of(spec, model, precision);
  out.class_key = out.shape.key();
  out.tokens = job::tokens_of(out.shape, model);
  out.prior_us = prior_run_us(out.shape, out.tokens, job::steps_of(spec.fields), !spec.loras.empty());
  out.spec = std::move(spec);
  return out;
}

Result<Classified> examine(const queue::IntakeEntry& entry, const job::Catalogue& catalogue,
                           const std::string& precision, const TenantAdapters& adapters) {
  if (!entry.problem.empty()) return invalid_argument(entry.problem);
  auto parsed = job::parse_spec(std::string_view(entry.spec));
  if (!parsed) return parsed.error();
  auto complete = job::complete_spec(
      std::move(parsed).value(), catalogue, [&](const job::LoraUse& use, const job::ModelEntry& model) {
        if (adapters) return adapters(entry.tenant, use, model);
        return Result<std::string>(
            invalid_argument("no LoRA adapter '" + use.name + "': this scheduler has no adapter registry"));
      });
  if (!complete) return complete.error();
  const job::ModelEntry& model = catalogue.models.at(complete->model);
  return classify(std::move(complete).value(), model, precision);
}

std::int64_t deadline_us(const queue::IntakeEntry& entry, const job::JobSpec& spec) {
  if (entry.deadline_ms > 0) return entry.deadline_ms * 1000;
  return spec.deadline_ms ? (entry.created_ms + *spec.deadline_ms) * 1000 : 0;
}

std::optional<Error> unmet_deadline(const Estimate& estimate, std::int64_t deadline_us, std::int64_t now_us) {
  if (deadline_us <= 0 || !estimate.observed) return std::nullopt;
  const auto needed = estimate.wait_us + estimate.run_us;
  if (now_us + needed <= deadline_us) return std::nullopt;
  return Error{
      Code::kResourceExhausted,
      fmt::format("the deadline in {} ms cannot be met: the prediction is {} ms of waiting and {} ms of running; "
                  "set a later deadline or use fewer steps",
                  std::max<std::int64_t>(0, deadline_us - now_us) / 1000, estimate.wait_us / 1000,
                  estimate.run_us / 1000),
      "deadline_ms"};
}

std::optional<Error> unmet_slots(const job::JobSpec& spec, int most_slots) {
  if (most_slots <= 0 || static_cast<int>(spec.loras.size()) <= most_slots) return std::nullopt;
  const auto named = adapters_of(spec);
  const auto needed = std::set(named.begin(), named.end()).size();
  if (static_cast<int>(needed) <= most_slots) return std::nullopt;
  return invalid_argument(
      fmt::format("loras lists {} adapters, but workers of '{}' have at most {} slots; use fewer adapters or "
                  "raise worker.lora.slots",
                  needed, spec.model, most_slots),
      "loras");
}

std::string with_commas(std::int64_t number) {
  auto out = std::to_string(number);
  for (auto at = std::ssize(out) - 3; at > 0; at -= 3) out.insert(static_cast<std::size_t>(at), ",");
  return out;
}

std::optional<Error> unmet_memory(const Classified& job, const std::string& worker, const queue::ModelMemory& most) {
  const auto& shape = job.shape;
  const auto largest = std::max_element(most.limits.begin(), most.limits.end(),
                                        [](const auto& a, const auto& b) { return a.max_pixels < b.max_pixels; });
  if (largest == most.limits.end() || shape.pixels() <= largest->max_pixels) return std::nullopt;
  const auto what = shape.frames > 1
                        ? fmt::format("a {}×{} video of {} frames", shape.width, shape.height, shape.frames)
                        : fmt::format("a {}×{} image", shape.width, shape.height);
  return invalid_argument(
      fmt::format("{} needs more memory than any worker of model '{}' has: at most {} pixels fit (worker {}, plan {}, "
                  "{:.1f} GiB available); use {}",
                  what, job.spec.model, with_commas(largest->max_pixels), worker, largest->plan,
                  static_cast<double>(most.available_bytes) / 0x1p30,
                  shape.frames > 1 ? "fewer frames or a smaller size" : "a smaller size"),
      shape.frames > 1 ? "frames" : "width");
}

std::vector<std::string> adapters_of(const job::JobSpec& spec) {
  std::vector<std::string> out;
  for (const auto& use : spec.loras) out.push_back(use.sha256);
  return out;
}

queue::Admission make_admission(const queue::IntakeEntry& entry, const Classified& job, std::int64_t cost_us) {
  return {.entry_id = entry.entry_id,
          .id = entry.id,
          .units = job.spec.n.value_or(1),
          .spec = job::to_json(job.spec),
          .class_key = job.class_key,
          .steps = job::steps_of(job.spec.fields),
          .adapters = adapters_of(job.spec),
          .cost_us = cost_us,
          .priority = job.spec.priority,
          .deadline_ms = deadline_us(entry, job.spec) / 1000,
          .raw = entry.raw,
          .tenant = entry.tenant,
          .idempotency_key = entry.idempotency_key,
          .traceparent = entry.traceparent};
}

queue::Rejection make_rejection(const queue::IntakeEntry& entry, Error error) {
  return {.entry_id = entry.entry_id,
          .id = entry.id,
          .error = std::move(error),
          .raw = entry.raw,
          .tenant = entry.tenant,
          .spec = entry.spec,
          .traceparent = entry.traceparent};
}

}  // namespace ditfleet::scheduling
