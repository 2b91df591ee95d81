#include "pipeline/engine/model_base.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "pipeline/device/failure.h"
#include "pipeline/engine/generation.h"
#include "shared/core/excerpt.h"

namespace ditfleet::pipeline {

template <class Run>
auto ModelBase::stage(const char* name, Run run, std::int64_t* lap_us)
    -> Result<decltype(run(std::declval<StageScope&>()))> {
  try {
    StageScope scope(placement_.device);
    auto out = run(scope);
    scope.finish();
    if (lap_us) *lap_us = scope.lap_us();
    return out;
  } catch (...) {
    const Error error = error_in_flight(name);
    if (error.code == Code::kOutOfMemory) release_cached_memory(placement_.device);
    return error;
  }
}

Result<std::unique_ptr<Generation>> ModelBase::encode(const GenerationRequest& request) {
  for (const LoraRequest& lora : request.loras)
    if (!info_.experts && lora.expert != job::Expert::kBoth)
      return invalid_argument("loras gives " + excerpt(lora.name.empty() ? lora.path : lora.name, 200) +
                                  " the expert " + std::string(job::expert_name(lora.expert)) +
                                  ", but this model has one transformer; leave the expert out",
                              "loras");
  std::int64_t took_us = 0;
  auto generation = stage(
      "encode", [&](StageScope&) { return run_encode(request); }, &took_us);
  if (generation) (*generation)->device_phases_us_["text"] = took_us;
  if (auto* made = generation ? dynamic_cast<GenerationBase*>(generation->get()) : nullptr)
    made->alone = request.alone.value_or(false);
  return generation;
}

Result<void> ModelBase::denoise(Generation& generation, const StepCallback& on_step) {
  const auto* own = dynamic_cast<const GenerationBase*>(&generation);
  const bool together = team_ && !(own && own->alone);
  // Whether to go on is up to rank 0.
  const StepCallback agreed = [&](const StepProgress& progress) {
    const bool go_on = team_.group->rank() > 0 || !on_step || on_step(progress);
    return unwrap(team_.group->agree(go_on));
  };
  const auto denoised = stage("denoise", [&](StageScope& scope) {
    std::unique_lock one_at_a_time(adapted_, std::defer_lock);
    if (uses_adapters(generation)) one_at_a_time.lock();
    auto& phases = generation.device_phases_us_;
    return run_denoise(generation, together ? agreed : on_step, [&] {
      scope.finish();
      const bool first = phases.emplace("first_step", 0).second;
      phases[first ? "first_step" : "steady_steps"] += scope.lap_us();
    });
  });
  if (together && !denoised) {  // the other ranks cannot go on without this one
    team_.group->abort();
    return Error{Code::kDeviceFault, denoised.error().message, {}};
  }
  const auto cleared = stage("denoise", [&](StageScope&) {
    clear_if_asked();
    return true;
  });
  if (!denoised) return denoised.error();
  if (!*denoised) return *denoised;
  return cleared ? Result<void>() : cleared.error();
}

Result<Media> ModelBase::decode(Generation& generation, const FrameCallback& on_frames) {
  return stage(
      "decode", [&](StageScope&) { return run_decode(generation, on_frames); }, &generation.device_phases_us_["vae"]);
}

Result<void> ModelBase::prefetch(const std::vector<LoraRequest>& loras, const AdapterDrops& drops) {
  try {
    const StageScope scope(placement_.device);
    for (const LoraRequest& lora : loras) adapters_.prefetch(lora, drops);
    return {};
  } catch (...) {
    return error_in_flight("prefetch");
  }
}

// If a request with adapters is being denoised, its end clears the columns.
void ModelBase::clear_if_asked() {
  if (!clearing_) return;
  const std::unique_lock nobody_reads(adapted_, std::try_to_lock);
  if (!nobody_reads || !clearing_.exchange(false)) return;
  clear_adapter_columns();
  synchronize_current(placement_.device);
}

void ModelBase::forget_adapter(const std::string& id) {
  try {
    StageScope scope(placement_.device);
    adapters_.forget(id);
    clearing_ = true;
    clear_if_asked();
    scope.finish();
  } catch (...) {  // no request finds it any more, but its slot may still hold it
    spdlog::error("cannot overwrite the slot of adapter {}: {}", id, error_in_flight("forget").message);
  }
}

}  // namespace ditfleet::pipeline
