#include "pipeline/families/flux/memory.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "pipeline/families/flux/adapters.h"
#include "pipeline/families/flux/conditioning.h"
#include "pipeline/families/flux/rope.h"
#include "pipeline/region/run/region_host.h"
#include "pipeline/sampling/latents.h"

namespace ditfleet::pipeline {
namespace {

MemoryNeeds::Group group_of(const PartSequence& parts) { return {parts.bytes(), parts.ahead_bytes()}; }

at::Tensor velocity_of(const FluxTransformer& flux, const Conditioning& conditioning, const at::Tensor& latents,
                       const at::Tensor& rope, const parallel::Team& team) {
  return flux.velocity(latents, conditioning.text, conditioning.modulation.step(0), rope, team);
}

}  // namespace

FluxNeeds::FluxNeeds(const LoadContext& context)
    : placement_{.device = kDryDevice, .dtype = context.placement.dtype, .stands_for = context.placement.device},
      folder_([&] {
        const std::lock_guard lock(dry_run_mutex());
        const c10::InferenceMode inference(true);
        const std::int64_t before = dry_bytes();
        auto folder = load_flux_folder(context.source, placement_, region::make_dry_host(*context.regions),
                                       context.adapter_columns);
        weights_.fixed = dry_bytes() - before;
        return folder;
      }()) {
  const TransformerParts& parts = folder_.transformer.parts();
  weights_.text = {folder_.clip.parts().bytes() + folder_.t5.parts().bytes(),
                   std::max(folder_.clip.parts().ahead_bytes(), folder_.t5.parts().ahead_bytes())};
  weights_.modulation = group_of(*parts.apart);
  weights_.blocks = group_of(*parts.blocks);
  // The first request allocates memory for values of quantized weights, which stays.
  const std::int64_t before = dry_bytes();
  measure(square(0).first);
  weights_.fixed += dry_bytes() - before;
  weights_.fixed = std::max<std::int64_t>(
      0, weights_.fixed - weights_.text.bytes - weights_.modulation.bytes - weights_.blocks.bytes);
  if (context.adapters.slots > 0)
    weights_.fixed += AdapterStore(lora_base(folder_), context.placement, context.adapters).slot_bytes();
}

RequestSize FluxNeeds::size(const FluxRequest& request, int size_multiple) {
  return {request.height / size_multiple,
          request.width / size_multiple,
          request.max_sequence_length,
          std::min<std::int64_t>(request.num_inference_steps, kModulationSteps),
          request.true_cfg_scale > 1 && request.negative_prompt,
          request.alone};
}

std::pair<RequestSize, std::int64_t> FluxNeeds::square(int side) const {
  const int multiple = folder_.size_multiple();
  FluxRequest request;
  request.width = request.height = std::max(1, side / multiple) * multiple;
  if (side == 0) request.num_inference_steps = request.max_sequence_length = 1;
  return {size(request, multiple), std::int64_t{request.width} * request.height};
}

MemoryNeeds FluxNeeds::of(const RequestSize& size) {
  return known_.of(size, [&](const RequestSize& one) { return measure(one); });
}

// The tensors of a request live as in FluxModel.
MemoryNeeds FluxNeeds::measure(const RequestSize& size) const {
  const std::int64_t rows = size[0], columns = size[1], text_tokens = size[2], steps = size[3], passes = 1 + size[4];
  const std::lock_guard lock(dry_run_mutex());
  const c10::InferenceMode inference(true);
  MemoryNeeds needs = weights_;
  needs.passes = static_cast<int>(passes);
  const std::int64_t before = dry_bytes();
  const auto peak_of = [&](const auto& stage) { return dry_peak_of(before, stage); };
  const auto options = at::TensorOptions(placement_.device);
  const at::Tensor sigmas = at::empty({steps + 1}, options), timesteps = at::empty({steps}, options);
  struct Prompt {
    at::Tensor pooled, tokens;
    std::optional<Conditioning> conditioning;
  };
  std::vector<Prompt> prompts(static_cast<std::size_t>(passes));
  needs.encode = peak_of([&] {
    const auto ids = [](std::int64_t count) { return std::vector<std::int32_t>(static_cast<std::size_t>(count)); };
    for (Prompt& prompt : prompts) {
      prompt.pooled = folder_.clip.pooled(ids(folder_.clip.config().max_position_embeddings));
      prompt.tokens = folder_.t5.encode(ids(text_tokens));
    }
    for (Prompt& prompt : prompts)
      prompt.conditioning =
          make_conditioning(folder_.transformer, prompt.tokens, prompt.pooled, timesteps, /*guidance=*/1);
  });
  at::Tensor latents =
      at::empty({1, rows * columns, folder_.transformer.config().in_channels}, options.dtype(placement_.dtype));
  needs.denoise = peak_of([&] {
    const at::Tensor rope = rope_table(folder_.transformer.config(), text_tokens, rows, columns, placement_);
    const FluxTransformer& flux = folder_.transformer;
    const parallel::Team team = size[5] ? parallel::Team() : flux.team();
    const auto forward = [&](bool negative, const parallel::Team& ranks) {
      return velocity_of(flux, *prompts[negative ? 1 : 0].conditioning, latents, rope, ranks);
    };
    const at::Tensor velocity = team.velocity(forward, passes > 1 ? std::optional(2.0) : std::nullopt);
    latents = euler_step(latents, velocity, sigmas[0], sigmas[1]);
  });
  needs.decode = peak_of([&] { unit_range(folder_.vae.decode(unpack_latents(latents, rows, columns))); });
  return needs;
}

Fit<FluxNeeds> fit_flux(LoadContext context, bool always) {
  const auto formats =
      formats_to_try(context.source, "text_encoder_2", context.placement.device, has_quantized_linears);
  const auto square = [](int side) { return [side](const FluxNeeds& needs) { return needs.square(side).first; }; };
  return fit<FluxNeeds>(std::move(context), always, formats, {square(1024), square(512), square(0)});
}

}  // namespace ditfleet::pipeline
