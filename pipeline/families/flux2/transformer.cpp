#include "pipeline/families/flux2/transformer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "pipeline/region/run/region_host.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::size_t kCachedBlocks = 1, kReferenceBlocks = 2;  // of BlockSpec::variants
constexpr std::int64_t kSingleRows = 12, kFinalRows = 15;       // where these begin in a step's modulation

}  // namespace

Flux2Transformer Flux2Transformer::load(const TransformerSource& source, const Flux2Config& config,
                                        Placement placement) {
  Flux2Transformer made(config, std::move(placement));
  made.Transformer::load(source, made.config_.heads);
  return made;
}

void Flux2Transformer::open_libraries(const region::RegionHost& host) const {
  const Placement where = placement();
  const c10::InferenceMode inference(true);
  const c10::DeviceGuard guard(where.device);
  region::open_attention(where.device, where.dtype, config_.heads, config_.head_dim, host.attention,
                         host.direct_attention.get());
  const auto options = at::TensorOptions(where.dtype).device(where.device);
  embed_text(at::zeros({1, 8, config_.text_width}, options));
  rope(8, {{2, 2}});
  const at::Tensor image =
      apply_linear(weights().linears[Flux2Linear::kImageIn], at::zeros({1, 4, config_.channels}, options));
  last_layer(image, modulation(at::ones({1}, options.dtype(c10::ScalarType::Float))));
  synchronize(where.device);
}

void Flux2Transformer::prewarm(std::int64_t text_tokens, std::int64_t image_tokens, std::int64_t references,
                               bool adapters) const {
  if (mode_for(image_tokens, 1) == region::Mode::kNone) return;
  region::Sizes sizes[] = {{{"batch", 1}, {"text", text_tokens}, {"image", image_tokens}},
                           {{"batch", 1}, {"tokens", text_tokens + image_tokens}}};
  if (references > 0)
    for (region::Sizes& of_block : sizes) of_block["references"] = references;
  Transformer::prewarm(sizes, adapters, references > 0 ? kCachedBlocks : 0);
}

at::Tensor Flux2Transformer::modulation(const at::Tensor& timesteps) const {
  const auto& linears = weights().linears;
  const auto type = placement().dtype;
  const at::Tensor time = (timesteps.to(type) / 1000).to(type) * 1000;
  const at::Tensor inner =
      at::silu(apply_linear(linears[Flux2Linear::kTimeFirst], sinusoids(time, config_.time_channels).to(type)));
  const at::Tensor activated = at::silu(apply_linear(linears[Flux2Linear::kTimeSecond], inner));
  const auto rows = [&](std::size_t linear, std::int64_t count) {
    return apply_linear(linears[linear], activated).unflatten(1, {count, config_.width()});
  };
  at::Tensor all = at::cat({rows(Flux2Linear::kImageModulation, 6), rows(Flux2Linear::kTextModulation, 6),
                            rows(Flux2Linear::kSingleModulation, 3), rows(Flux2Linear::kFinalModulation, 2)},
                           1);
  for (const std::int64_t scale : {1, 4, 7, 10, 13, 15}) all.select(1, scale).add_(1);
  return all;
}

at::Tensor Flux2Transformer::embed_text(const at::Tensor& prompt_embeds) const {
  return apply_linear(weights().linears[Flux2Linear::kTextIn], prompt_embeds);
}

at::Tensor Flux2Transformer::rope(std::int64_t text, const std::vector<TokenGrid>& grids) const {
  using c10::ScalarType;
  const std::int64_t image = tokens_of(grids);
  if (placement().device.is_meta())
    return at::empty({1, text + image, 1, config_.head_dim / 2},
                     at::TensorOptions(ScalarType::ComplexFloat).device(placement().device));
  const auto [time, row, column] = picture_positions(text, grids, 10);
  const at::Tensor positions[] = {
      time, row, column, at::cat({at::arange(text, ScalarType::Float), at::zeros({image}, ScalarType::Float)})};
  return rope_of(positions, config_.axes, placement().device, config_.rope_theta);
}

at::Tensor Flux2Transformer::last_layer(const at::Tensor& image, const at::Tensor& modulation) const {
  const at::Tensor normed =
      at::layer_norm(image, {config_.width()}, {}, {}, config_.eps) * modulation.narrow(1, kFinalRows, 1) +
      modulation.narrow(1, kFinalRows + 1, 1);
  return apply_linear(weights().linears[Flux2Linear::kImageOut], normed);
}

Flux2Transformer::Cached Flux2Transformer::references(const at::Tensor& reference_tokens,
                                                      const at::Tensor& rope) const {
  const at::Tensor rows =
      modulation(at::zeros({1}, at::TensorOptions(c10::ScalarType::Float).device(placement().device)));
  at::Tensor m[kFinalRows];
  for (std::int64_t row = 0; row < kFinalRows; ++row) m[row] = rows.narrow(1, row, 1);
  const at::Tensor table = rope_rows(rope);
  at::Tensor x = apply_linear(weights().linears[Flux2Linear::kImageIn], reference_tokens);
  Cached made;
  PartSequence::Pass pass(parts().blocks.get());
  for (std::size_t i = 0; i < weights().blocks.size(); ++i) {
    pass.begin(i);
    const auto outputs =
        weights().blocks[i].spec == Flux2Blocks::kSingle
            ? run_eagerly(i, {&x, &table, &m[kSingleRows], &m[kSingleRows + 1], &m[kSingleRows + 2]}, nullptr,
                          kReferenceBlocks)
            : run_eagerly(i, {&x, &table, &m[0], &m[1], &m[2], &m[3], &m[4], &m[5]}, nullptr, kReferenceBlocks);
    pass.end(i);
    x = outputs[0];
    made.blocks.emplace_back(outputs[1].contiguous(), outputs[2].contiguous());
  }
  return made;
}

at::Tensor Flux2Transformer::velocity(const at::Tensor& latents, const at::Tensor& text_tokens,
                                      const at::Tensor& modulation, const at::Tensor& rope, const parallel::Team& team,
                                      const Cached* cached) const {
  // With fewer tokens than ranks each rank computes all.
  if (team && (cached || std::min(latents.size(1), text_tokens.size(1)) < team.count))
    return velocity(latents, text_tokens, modulation, rope, {}, cached);
  at::Tensor own_rope = rope, text = text_tokens, own = latents;
  std::optional<parallel::Sequence> of_image, joint;
  if (team) {
    const parallel::Sequence of_text(team, text.size(1));
    of_image.emplace(team, latents.size(1));
    joint.emplace(of_text, *of_image);
    own_rope = at::cat({of_text.own(rope.slice(1, 0, text.size(1))), of_image->own(rope.slice(1, text.size(1)))}, 1);
    text = of_text.own(text);
    own = of_image->own(latents);
  }
  text = text.clone();  // double blocks write to it, and the caller needs it for the next step
  const parallel::Sequence* const shared = joint ? &*joint : nullptr;
  const region::Mode mode = mode_for(latents.size(1), 1);
  const at::Tensor table = rope_rows(own_rope);
  at::Tensor m[kFinalRows];
  for (std::int64_t row = 0; row < kFinalRows; ++row) m[row] = modulation.narrow(1, row, 1);
  at::Tensor image = apply_linear(weights().linears[Flux2Linear::kImageIn], own), tokens;
  const auto& blocks = weights().blocks;
  PartSequence::Pass pass(parts().blocks.get());
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const bool single = blocks[i].spec == Flux2Blocks::kSingle;
    if (single && !tokens.defined()) tokens = at::cat({text, image}, 1);
    pass.begin(i);
    const auto* keys = cached ? &cached->blocks[i].first : nullptr;
    const auto* values = cached ? &cached->blocks[i].second : nullptr;
    if (single && cached)
      run_block(mode, i, {&tokens, &table, &m[kSingleRows], &m[kSingleRows + 1], &m[kSingleRows + 2], keys, values},
                {&tokens}, shared, kCachedBlocks);
    else if (single)
      run_block(mode, i, {&tokens, &table, &m[kSingleRows], &m[kSingleRows + 1], &m[kSingleRows + 2]}, {&tokens},
                shared);
    else if (cached)
      run_block(mode, i,
                {&image, &text, &table, &m[0], &m[1], &m[2], &m[3], &m[4], &m[5], &m[6], &m[7], &m[8], &m[9], &m[10],
                 &m[11], keys, values},
                {&image, &text}, shared, kCachedBlocks);
    else
      run_block(
          mode, i,
          {&image, &text, &table, &m[0], &m[1], &m[2], &m[3], &m[4], &m[5], &m[6], &m[7], &m[8], &m[9], &m[10], &m[11]},
          {&image, &text}, shared);
    pass.end(i);
  }
  if (tokens.defined()) image = tokens.slice(1, text.size(1));
  image = last_layer(image, modulation);
  return of_image ? of_image->gather(image) : image;
}

}  // namespace ditfleet::pipeline
