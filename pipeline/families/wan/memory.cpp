#include "pipeline/families/wan/memory.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <vector>

#include "pipeline/families/wan/adapters.h"
#include "pipeline/region/run/region_host.h"
#include "pipeline/sampling/latents.h"

namespace ditfleet::pipeline {
namespace {

// Latent frames after which decoding has reached its peak: the caches of its convolutions are full.
constexpr std::int64_t kDecodedFrames = 3;
constexpr int kSteps = 4;  // after which the sampler keeps as many tensors as later

// With adapters that fill the columns.
WanTransformer filled(const WanTransformer& transformer) {
  TransformerWeights weights = transformer.weights();
  for (const NamedLinear& linear : transformer.named_linears(weights)) {
    LinearSlot& slot = *linear.slot;
    const std::int64_t rank = slot.lora_columns.count;
    if (rank > 0 && slot.low_rank.empty())
      slot.low_rank = {{at::empty({rank, slot.in()}, slot.wide.options()),
                        at::empty({slot.out(), rank}, slot.wide.options()), 0, 1}};
  }
  return transformer.adapted(std::move(weights));
}

}  // namespace

WanNeeds::WanNeeds(const LoadContext& context)
    : placement_{.device = kDryDevice, .dtype = context.placement.dtype, .stands_for = context.placement.device},
      folder_([&] {
        const std::lock_guard lock(dry_run_mutex());
        const c10::InferenceMode inference(true);
        const std::int64_t before = dry_bytes();
        auto folder = load_wan_folder(context.source, placement_, region::make_dry_host(*context.regions),
                                      context.adapter_columns);
        weights_.fixed = dry_bytes() - before;
        return folder;
      }()) {
  weights_.text = {folder_.text.parts().bytes(), folder_.text.parts().ahead_bytes()};
  const PartSequence& blocks = *folder_.transformer.parts().blocks;
  weights_.blocks = {blocks.bytes(), blocks.ahead_bytes()};
  if (folder_.transformer_2) {
    const PartSequence& second = *folder_.transformer_2->parts().blocks;
    weights_.other_blocks = std::min(blocks.bytes(), second.bytes());
    weights_.blocks = {std::max(blocks.bytes(), second.bytes()), std::max(blocks.ahead_bytes(), second.ahead_bytes())};
  }
  weights_.blocks_leave_to_decode = true;
  weights_.fixed -= weights_.text.bytes + weights_.blocks.bytes + weights_.other_blocks;
  // The first request allocates memory for values of quantized weights, which stays.
  const std::int64_t before = dry_bytes();
  measure(video(0).first);
  weights_.fixed += dry_bytes() - before;
  if (context.adapters.slots > 0)
    weights_.fixed += AdapterStore(lora_base(folder_), context.placement, context.adapters).slot_bytes();
}

RequestSize WanNeeds::size(const GenerationRequest& request) const {
  const int multiple = folder_.size_multiple();
  return size(read_wan_request(request, multiple, folder_.transformer_2.has_value(), folder_.from_image), multiple);
}

RequestSize WanNeeds::size(const WanRequest& request, int size_multiple) {
  return {(request.num_frames - 1) / 4 + 1,
          request.height / size_multiple,
          request.width / size_multiple,
          request.max_sequence_length,
          request.guidance_scale > 1,
          !request.loras.empty(),
          request.alone};
}

std::pair<RequestSize, std::int64_t> WanNeeds::video(int frames) const {
  const int multiple = folder_.size_multiple();
  WanRequest request;
  request.num_frames = std::max(1, frames);
  request.width = request.width / multiple * multiple;
  request.height = request.height / multiple * multiple;
  if (frames == 0) {
    request.width = request.height = multiple;
    request.max_sequence_length = 1;
  }
  return {size(request, multiple), std::int64_t{request.width} * request.height * request.num_frames};
}

MemoryNeeds WanNeeds::of(const RequestSize& size) {
  return known_.of(size, [&](const RequestSize& one) { return measure(one); });
}

// The tensors of a request live as in WanModel.
MemoryNeeds WanNeeds::measure(const RequestSize& size) const {
  const std::int64_t frames = size[0], text_tokens = size[3], passes = 1 + size[4];
  const std::int64_t patch = folder_.size_multiple() / folder_.vae.config().spatial_factor();
  const std::int64_t rows = size[1] * patch, columns = size[2] * patch;
  const std::lock_guard lock(dry_run_mutex());
  const c10::InferenceMode inference(true);
  const WanTransformer transformer = size[5] ? filled(folder_.transformer) : folder_.transformer;
  const parallel::Team team = size[6] ? parallel::Team() : transformer.team();
  MemoryNeeds needs = weights_;
  needs.passes = static_cast<int>(passes);
  const std::int64_t before = dry_bytes();
  const auto peak_of = [&](const auto& stage) { return dry_peak_of(before, stage); };
  std::vector<at::Tensor> prompts, texts;
  needs.encode = peak_of([&] {
    if (folder_.from_image) {
      const std::int64_t factor = folder_.vae.config().spatial_factor();
      folder_.vae.encode(at::empty({1, 3, frames > 1 ? 5 : 1, rows * factor, columns * factor},
                                   at::TensorOptions(placement_.device).dtype(c10::ScalarType::Float)));
    }
    for (std::int64_t i = 0; i < passes; ++i) {
      const at::Tensor embeds = folder_.text.encode(std::vector<std::int32_t>(static_cast<std::size_t>(text_tokens)));
      prompts.push_back(at::constant_pad_nd(embeds, {0, 0, 0, 0}));
    }
    for (const at::Tensor& prompt : prompts) {
      texts.push_back(folder_.transformer.embed_text(prompt));
      if (folder_.transformer_2) texts.push_back(folder_.transformer_2->embed_text(prompt));
    }
  });
  const auto draw = [&](std::int64_t channels) {
    return at::empty({1, channels, frames, rows, columns},
                     at::TensorOptions(placement_.device).dtype(c10::ScalarType::Float));
  };
  const WanConfig& config = folder_.transformer.config();
  at::Tensor latents = draw(config.out_channels);
  needs.denoise = peak_of([&] {
    const at::Tensor rope = transformer.rope(frames, rows, columns);
    const Schedule schedule = make_flow_schedule(folder_.scheduler, kSteps);
    const auto sampler = make_flow_sampler(folder_.scheduler, schedule, placement_.device);
    for (std::int64_t step = 0; step < kSteps; ++step) {
      const at::Tensor input = draw(config.in_channels).to(placement_.dtype);
      const auto forward = [&](bool, const parallel::Team& ranks) {
        return transformer.velocity(input, 1000, texts[0], rope, ranks);
      };
      const at::Tensor velocity = team.velocity(forward, passes > 1 ? std::optional(2.0) : std::nullopt);
      latents = sampler->step(latents, velocity, step);
    }
  });
  needs.decode = peak_of([&] {
    folder_.vae.decode(latents.narrow(2, 0, std::min(frames, kDecodedFrames)),
                       [](const at::Tensor& decoded) { unit_range(decoded); });
  });
  return needs;
}

}  // namespace ditfleet::pipeline
