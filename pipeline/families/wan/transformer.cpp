#include "pipeline/families/wan/transformer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/sin.h>

#include <cmath>

#include "pipeline/device/failure.h"
#include "pipeline/families/wan/blocks.h"
#include "pipeline/families/wan/rope.h"

namespace ditfleet::pipeline {
namespace {

constexpr double kMaxPeriod = 10000;

// [1, count] fp32: cosines, then sines. The timestep is fp32, as in diffusers.
at::Tensor sinusoids(double timestep, std::int64_t count, c10::Device device) {
  const auto fp32 = at::TensorOptions(c10::ScalarType::Float).device(device);
  const at::Tensor frequencies =
      at::exp(-std::log(kMaxPeriod) * at::arange(0, count / 2, fp32) / static_cast<double>(count / 2));
  const at::Tensor angles = (static_cast<float>(timestep) * frequencies).unsqueeze(0);
  return at::cat({at::cos(angles), at::sin(angles)}, 1);
}

}  // namespace

WanTransformer WanTransformer::load(const std::string& dir, Placement placement, const std::string& name) {
  WanTransformer made;
  made.config_ = read_wan_config(ConfigFile(dir + "/config.json"));
  made.placement_ = placement;
  auto parameters = Parameters::open(dir, Library::kDiffusers, placement);
  made.parts_ = std::make_shared<PartSequence>(placement, name, /*repeats=*/true);
  made.slots_ = bind_wan_slots(made.config_, parameters, *made.parts_);
  parameters.finish("");
  made.bytes_ = parameters.bytes();
  return made;
}

WanTransformer WanTransformer::adapted(WanSlots slots) const {
  WanTransformer made = *this;
  made.slots_ = std::move(slots);
  return made;
}

at::Tensor WanTransformer::embed_text(const at::Tensor& prompt_embeds) const {
  const at::Tensor inner = at::gelu(apply_linear(slots_.text_first, prompt_embeds.to(placement_.dtype)), "tanh");
  return apply_linear(slots_.text_second, inner);
}

at::Tensor WanTransformer::rope(std::int64_t frames, std::int64_t rows, std::int64_t columns) const {
  return wan_rope_table(config_, frames, rows / 2, columns / 2, placement_.device);
}

at::Tensor WanTransformer::velocity(const at::Tensor& latents, double timestep, const at::Tensor& text,
                                    const at::Tensor& rope) const {
  if (latents.dim() != 5 || latents.size(0) != 1 || latents.size(1) != config_.in_channels ||
      latents.size(3) % 2 != 0 || latents.size(4) % 2 != 0) {
    std::string shape;
    for (const std::int64_t size : latents.sizes()) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
    fail(Code::kInvalidArgument, "latents have shape [" + shape + "]; this transformer needs [1, " +
                                     std::to_string(config_.in_channels) + ", frames, even rows, even columns]");
  }
  const std::int64_t frames = latents.size(2), rows = latents.size(3) / 2, columns = latents.size(4) / 2;
  const at::Tensor patches = latents.to(placement_.dtype)
                                 .reshape({config_.in_channels, frames, rows, 2, columns, 2})
                                 .permute({1, 2, 4, 0, 3, 5})
                                 .reshape({1, frames * rows * columns, 4 * config_.in_channels});
  at::Tensor x = apply_linear(slots_.patch_in, patches);
  const at::Tensor sines = sinusoids(timestep, config_.freq_dim, placement_.device);
  const at::Tensor conditioning =
      apply_linear(slots_.time_second, at::silu(apply_linear(slots_.time_first, sines))).to(placement_.dtype);
  const at::Tensor time = apply_linear(slots_.time_proj, at::silu(conditioning)).unflatten(1, {6, config_.width()});
  PartSequence::Pass pass(parts_.get());
  for (std::size_t i = 0; i < slots_.blocks.size(); ++i) {
    pass.begin(i);
    x = wan_block(std::move(x), text, time, rope, slots_.blocks[i], config_);
    pass.end(i);
  }
  const std::vector<at::Tensor> head = (slots_.table + conditioning.unsqueeze(1)).chunk(2, 1);
  return apply_linear(slots_.patch_out, wan_modulated_norm(x, head[0], head[1], config_.eps))
      .view({frames, rows, columns, 2, 2, config_.out_channels})
      .permute({5, 0, 1, 3, 2, 4})
      .reshape({1, config_.out_channels, frames, 2 * rows, 2 * columns});
}

}  // namespace ditfleet::pipeline
