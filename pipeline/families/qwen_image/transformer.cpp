#include "pipeline/families/qwen_image/transformer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "pipeline/nn/text/activation.h"
#include "pipeline/region/run/region_host.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kBlockRows = 12;
constexpr double kEps = 1e-6;

}  // namespace

QwenImageTransformer QwenImageTransformer::load(const TransformerSource& source, Placement placement, bool pictures) {
  QwenImageConfig config = read_qwen_image_config(ConfigFile(source.files.dir + "/config.json"));
  config.zero_cond_t = config.zero_cond_t && pictures;
  QwenImageTransformer made(config, std::move(placement));
  made.Transformer::load(source, made.config_.heads);
  return made;
}

void QwenImageTransformer::open_libraries(const region::RegionHost& host) const {
  const Placement where = placement();
  const c10::InferenceMode inference(true);
  const c10::DeviceGuard guard(where.device);
  region::open_attention(where.device, where.dtype, config_.heads, config_.head_dim, host.attention,
                         host.direct_attention.get());
  const auto options = at::TensorOptions(where.dtype).device(where.device);
  embed_text(at::zeros({1, 8, config_.text_width}, options));
  rope(8, {{2, 2}});
  const at::Tensor image =
      apply_linear(weights().linears[QwenImageLinear::kImageIn], at::zeros({1, 4, config_.channels}, options));
  last_layer(image, modulation(at::ones({1}, options.dtype(c10::ScalarType::Float))).steps);
  synchronize(where.device);
}

void QwenImageTransformer::prewarm(std::int64_t text_tokens, std::int64_t image_tokens, std::int64_t picture_tokens,
                                   bool adapters) const {
  if (mode_for(image_tokens, 1) == region::Mode::kNone) return;
  region::Sizes sizes{{"batch", 1}, {"text", text_tokens}, {"image", image_tokens}};
  if (config_.zero_cond_t)
    sizes["pictures"] = picture_tokens;
  else
    sizes["image"] += picture_tokens;
  Transformer::prewarm(std::span(&sizes, 1), adapters);
}

QwenImageTransformer::Modulation QwenImageTransformer::modulation(const at::Tensor& timesteps) const {
  const auto& [linears, tensors, blocks] = weights();
  const auto type = placement().dtype;
  const std::int64_t steps = timesteps.size(0), d = config_.width();
  at::Tensor time = (timesteps.to(type) / 1000).to(type);
  if (config_.zero_cond_t) time = at::cat({time, at::zeros({1}, time.options())});
  const at::Tensor inner =
      at::silu(apply_linear(linears[QwenImageLinear::kTimeFirst], sinusoids(time, 256, /*scale=*/1000).to(type)));
  const at::Tensor all = at::silu(apply_linear(linears[QwenImageLinear::kTimeSecond], inner)),
                   of_steps = all.narrow(0, 0, steps);
  std::vector<at::Tensor> rows, zero;
  const auto made = [&](const LinearSlot& slot, const at::Tensor& from, std::int64_t count,
                        std::initializer_list<std::int64_t> scales) {
    at::Tensor table = apply_linear(slot, from).unflatten(1, {count, d});
    for (const std::int64_t scale : scales) table.select(1, scale).add_(1);
    return table;
  };
  PartSequence::Pass pass(parts().apart.get());
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    pass.begin(i);
    const at::Tensor image = made(blocks[i].linears[QwenImageBlockLinear::kImageModulation], all, 6, {1, 4});
    rows.push_back(image.narrow(0, 0, steps));
    if (config_.zero_cond_t) zero.push_back(image.narrow(0, steps, 1));
    rows.push_back(made(blocks[i].linears[QwenImageBlockLinear::kTextModulation], of_steps, 6, {1, 4}));
    pass.end(i);
  }
  rows.push_back(made(linears[QwenImageLinear::kFinalModulation], of_steps, 2, {0}));
  return {at::cat(rows, 1), zero.empty() ? at::Tensor() : at::cat(zero, 1)};
}

at::Tensor QwenImageTransformer::embed_text(const at::Tensor& prompt_embeds) const {
  return apply_linear(weights().linears[QwenImageLinear::kTextIn],
                      qwen_norm(prompt_embeds, weights().tensors[0], kEps));
}

at::Tensor QwenImageTransformer::rope(std::int64_t text, const std::vector<TokenGrid>& grids) const {
  using c10::ScalarType;
  std::int64_t largest = 0;
  for (const auto& [rows, columns] : grids) largest = std::max({largest, rows / 2, columns / 2});
  if (placement().device.is_meta())
    return at::empty({1, text + tokens_of(grids), 1, config_.head_dim / 2},
                     at::TensorOptions(ScalarType::ComplexFloat).device(placement().device));
  std::array<std::vector<at::Tensor>, 3> parts;  // picture, row, column
  for (auto& part : parts) part.push_back(at::arange(largest, largest + text, ScalarType::Float));
  for (std::size_t i = 0; i < grids.size(); ++i) {
    const auto [rows, columns] = grids[i];
    const auto [row, column] = grid_positions(rows, columns);
    parts[0].push_back(at::full({rows * columns}, static_cast<double>(i), ScalarType::Float));
    // The middle is 0.
    parts[1].push_back(row - (rows - rows / 2));
    parts[2].push_back(column - (columns - columns / 2));
  }
  const at::Tensor positions[] = {at::cat(parts[0]), at::cat(parts[1]), at::cat(parts[2])};
  return rope_of(positions, config_.axes, placement().device, 10000, /*fp32_angles=*/true);
}

at::Tensor QwenImageTransformer::last_layer(const at::Tensor& image, const at::Tensor& rows) const {
  const std::int64_t first = kBlockRows * config_.blocks;
  const at::Tensor normed =
      at::layer_norm(image, {config_.width()}, {}, {}, kEps) * rows.narrow(1, first, 1) + rows.narrow(1, first + 1, 1);
  return apply_linear(weights().linears[QwenImageLinear::kImageOut], normed);
}

at::Tensor QwenImageTransformer::velocity(const at::Tensor& latents, const at::Tensor& pictures,
                                          const at::Tensor& text_tokens, const at::Tensor& rows, const at::Tensor& zero,
                                          const at::Tensor& rope, const parallel::Team& team) const {
  const std::int64_t image_tokens = latents.size(1);
  const bool apart = config_.zero_cond_t;  // pictures have rows of their own
  at::Tensor in = pictures.defined() && !apart ? at::cat({latents, pictures}, 1) : latents;
  // With fewer tokens than ranks each rank computes all. A sequence has two kinds of tokens.
  if (team && (apart || std::min(in.size(1), text_tokens.size(1)) < team.count))
    return velocity(latents, pictures, text_tokens, rows, zero, rope);
  at::Tensor own_rope = rope, text = text_tokens;
  std::optional<parallel::Sequence> of_image, joint;
  if (team) {
    const parallel::Sequence of_text(team, text.size(1));
    of_image.emplace(team, in.size(1));
    joint.emplace(of_text, *of_image);
    own_rope = at::cat({of_text.own(rope.slice(1, 0, text.size(1))), of_image->own(rope.slice(1, text.size(1)))}, 1);
    text = of_text.own(text);
    in = of_image->own(in);
  }
  text = text.clone();  // blocks write to it, and the caller needs it for the next step
  const parallel::Sequence* const shared = joint ? &*joint : nullptr;
  const region::Mode mode = mode_for(image_tokens, 1);
  const at::Tensor table = rope_rows(own_rope);
  const LinearSlot& first = weights().linears[QwenImageLinear::kImageIn];
  at::Tensor image = apply_linear(first, in), others = apart ? apply_linear(first, pictures) : at::Tensor();
  PartSequence::Pass pass(parts().blocks.get());
  for (std::size_t i = 0; i < weights().blocks.size(); ++i) {
    at::Tensor m[kBlockRows], z[kBlockRows / 2];
    for (std::int64_t row = 0; row < kBlockRows; ++row)
      m[row] = rows.narrow(1, kBlockRows * static_cast<std::int64_t>(i) + row, 1);
    for (std::int64_t row = 0; apart && row < kBlockRows / 2; ++row)
      z[row] = zero.narrow(1, kBlockRows / 2 * static_cast<std::int64_t>(i) + row, 1);
    pass.begin(i);
    if (apart)
      run_block(mode, i, {&image, &others, &text, &table, &m[0], &m[1], &m[2], &m[3], &m[4], &m[5],  &z[0],
                          &z[1],  &z[2],   &z[3], &z[4],  &z[5], &m[6], &m[7], &m[8], &m[9], &m[10], &m[11]},
                {&image, &others, &text}, shared);
    else
      run_block(
          mode, i,
          {&image, &text, &table, &m[0], &m[1], &m[2], &m[3], &m[4], &m[5], &m[6], &m[7], &m[8], &m[9], &m[10], &m[11]},
          {&image, &text}, shared);
    pass.end(i);
  }
  if (of_image) image = of_image->gather(image);
  return last_layer(image.narrow(1, 0, image_tokens), rows);
}

}  // namespace ditfleet::pipeline
