#include "pipeline/families/z_image/transformer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <optional>
#include <utility>

#include "pipeline/nn/rope.h"
#include "pipeline/region/run/region_host.h"

namespace ditfleet::pipeline {
namespace {

constexpr double kFinalEps = 1e-6;

// Tokens and after them the padding's, which is the same for all.
at::Tensor filled(const at::Tensor& tokens, const at::Tensor& padding) {
  const std::int64_t more = z_image_filled(tokens.size(1)) - tokens.size(1);
  return more == 0 ? tokens : at::cat({tokens, padding.unsqueeze(0).expand({1, more, -1})}, 1);
}

}  // namespace

ZImageTransformer ZImageTransformer::load(const TransformerSource& source, Placement placement) {
  ZImageTransformer made(read_z_image_config(ConfigFile(source.files.dir + "/config.json")), std::move(placement));
  made.Transformer::load(source, made.config_.heads);
  return made;
}

void ZImageTransformer::open_libraries(const region::RegionHost& host) const {
  const Placement where = placement();
  const c10::InferenceMode inference(true);
  const c10::DeviceGuard guard(where.device);
  region::open_attention(where.device, where.dtype, config_.heads, config_.head_dim(), host.attention,
                         host.direct_attention.get());
  const auto options = at::TensorOptions(where.dtype).device(where.device);
  embed_text(at::zeros({1, 8, config_.text_width}, options));
  const at::Tensor rows = modulation(at::ones({1}, options.dtype(c10::ScalarType::Float)));
  rope(kZImageMultiple, 2, 2);
  const auto& linears = weights().linears;
  const at::Tensor image =
      apply_linear(linears[ZImageLinear::kImageIn], at::zeros({1, 4, 4 * config_.channels}, options));
  apply_linear(linears[ZImageLinear::kImageOut],
               at::layer_norm(image, {config_.width}, {}, {}, kFinalEps) * rows.narrow(1, 0, 1));
  synchronize(where.device);
}

void ZImageTransformer::prewarm(std::int64_t text_tokens, std::int64_t rows, std::int64_t columns,
                                bool adapters) const {
  const std::int64_t image = z_image_filled(rows * columns);
  if (mode_for(image, 1) == region::Mode::kNone) return;
  const region::Sizes sizes[] = {
      {}, {{"batch", 1}, {"tokens", image}}, {{"batch", 1}, {"tokens", image + text_tokens}}};
  Transformer::prewarm(sizes, adapters);
}

at::Tensor ZImageTransformer::modulation(const at::Tensor& timesteps) const {
  const auto& [linears, tensors, blocks] = weights();
  // The time is fp32 up to the sinusoids.
  const at::Tensor time = (1000 - timesteps) / 1000 * config_.time_scale;
  const at::Tensor inner =
      at::silu(apply_linear(linears[ZImageLinear::kTimeFirst], sinusoids(time, 256).to(placement().dtype)));
  const at::Tensor conditioning = apply_linear(linears[ZImageLinear::kTimeSecond], inner);
  std::vector<at::Tensor> rows;
  PartSequence::Pass pass(parts().apart.get());
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].spec == ZImageBlocks::kText) continue;
    pass.begin(i);
    at::Tensor of_block =
        apply_linear(blocks[i].linears[ZImageBlockLinear::kModulation], conditioning).unflatten(1, {4, config_.width});
    for (const std::int64_t row : {0, 2}) of_block.select(1, row).add_(1);
    for (const std::int64_t row : {1, 3}) of_block.select(1, row).tanh_();
    rows.push_back(std::move(of_block));
    pass.end(i);
  }
  rows.push_back(apply_linear(linears[ZImageLinear::kFinalScale], at::silu(conditioning)).unsqueeze(1) + 1);
  return at::cat(rows, 1);
}

at::Tensor ZImageTransformer::embed_text(const at::Tensor& prompt_embeds) const {
  const auto& [linears, tensors, blocks] = weights();
  const at::Tensor normed = at::rms_norm(prompt_embeds, {config_.text_width}, {}, config_.norm_eps);
  at::Tensor text = filled(apply_linear(linears[ZImageLinear::kTextIn], normed * tensors[ZImageTensor::kTextNorm]),
                           tensors[ZImageTensor::kTextPad]);
  const at::Tensor rope = rope_rows(this->rope(text.size(1), 0, 0));
  PartSequence::Pass pass(parts().apart.get());
  for (std::size_t i = 0; i < blocks.size() && blocks[i].spec == ZImageBlocks::kText; ++i) {
    pass.begin(i);
    text = run_eagerly(i, {&text, &rope}, nullptr)[0];
    pass.end(i);
  }
  return text;
}

at::Tensor ZImageTransformer::rope(std::int64_t text, std::int64_t rows, std::int64_t columns) const {
  using c10::ScalarType;
  const std::int64_t image = rows * columns, padding = z_image_filled(image) - image;
  if (placement().device.is_meta())
    return at::empty({1, image + padding + text, 1, config_.head_dim() / 2},
                     at::TensorOptions(ScalarType::ComplexFloat).device(placement().device));
  const at::Tensor none = at::zeros({padding}, ScalarType::Float), of_text = at::zeros({text}, ScalarType::Float);
  const auto [row, column] = grid_positions(rows, columns);
  const at::Tensor positions[] = {
      at::cat({at::full({image}, text + 1, ScalarType::Float), none, at::arange(1, text + 1, ScalarType::Float)}),
      at::cat({row, none, of_text}), at::cat({column, none, of_text})};
  return rope_of(positions, config_.axes, placement().device, config_.rope_theta, /*fp32_angles=*/true);
}

at::Tensor ZImageTransformer::velocity(const at::Tensor& latents, const at::Tensor& text, const at::Tensor& modulation,
                                       const at::Tensor& rope, const parallel::Team& team) const {
  const auto& [linears, tensors, blocks] = weights();
  const std::int64_t channels = config_.channels, rows = latents.size(2) / 2, columns = latents.size(3) / 2;
  const at::Tensor patches = latents.to(placement().dtype)
                                 .reshape({channels, rows, 2, columns, 2})
                                 .permute({1, 3, 2, 4, 0})
                                 .reshape({1, rows * columns, 4 * channels});
  at::Tensor x = filled(apply_linear(linears[ZImageLinear::kImageIn], patches), tensors[ZImageTensor::kImagePad]);
  at::Tensor caption = text, joint_rope = rope;
  const std::int64_t image_tokens = x.size(1);
  std::optional<parallel::Sequence> of_image, joint;
  if (team) {
    const parallel::Sequence of_text(team, text.size(1));
    of_image.emplace(team, image_tokens);
    joint.emplace(*of_image, of_text);
    x = of_image->own(x);
    caption = of_text.own(text);
    joint_rope = at::cat({of_image->own(rope.slice(1, 0, image_tokens)), of_text.own(rope.slice(1, image_tokens))}, 1);
  }
  const region::Mode mode = mode_for(image_tokens, 1);
  const std::int64_t own = x.size(1);
  const at::Tensor all_rows = rope_rows(joint_rope), image_rows = all_rows.slice(0, 0, own);
  PartSequence::Pass pass(parts().blocks.get());
  std::int64_t row = 0;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].spec == ZImageBlocks::kText) continue;
    const bool of_joint = blocks[i].spec == ZImageBlocks::kJoint;
    if (of_joint && x.size(1) == own) x = at::cat({x, caption}, 1);
    at::Tensor m[4];
    for (at::Tensor& one : m) one = modulation.narrow(1, row++, 1);
    const at::Tensor& table = of_joint ? all_rows : image_rows;
    const auto& sequence = of_joint ? joint : of_image;
    pass.begin(i);
    run_block(mode, i, {&x, &table, &m[0], &m[1], &m[2], &m[3]}, {&x}, sequence ? &*sequence : nullptr);
    pass.end(i);
  }
  x = at::layer_norm(x.slice(1, 0, own), {config_.width}, {}, {}, kFinalEps) * modulation.narrow(1, row, 1);
  x = apply_linear(linears[ZImageLinear::kImageOut], x);
  if (of_image) x = of_image->gather(x);
  return x.slice(1, 0, rows * columns)
      .view({rows, columns, 2, 2, channels})
      .permute({4, 0, 2, 1, 3})
      .reshape({1, channels, 2 * rows, 2 * columns});
}

}  // namespace ditfleet::pipeline
