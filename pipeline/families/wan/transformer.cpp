#include "pipeline/families/wan/transformer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/silu.h>

#include <array>
#include <optional>
#include <utility>

#include "pipeline/device/failure.h"
#include "pipeline/families/wan/blocks.h"
#include "pipeline/families/wan/rope.h"

namespace ditfleet::pipeline {
WanTransformer WanTransformer::load(const TransformerSource& source, Placement placement) {
  WanTransformer made(read_wan_config(ConfigFile(source.files.dir + "/config.json")), std::move(placement));
  made.Transformer::load(source, made.config_.heads);
  return made;
}

void WanTransformer::compiled_blocks() {
  std::vector<at::Tensor> tables;
  for (const TransformerBlock& block : weights().blocks) tables.push_back(block.tensors[WanBlockTensor::kTable]);
  tables_ = at::cat(tables);
}

void WanTransformer::prewarm(std::int64_t frames, std::int64_t rows, std::int64_t columns, std::int64_t text,
                             bool adapters) const {
  const std::int64_t tokens = frames * (rows / 2) * (columns / 2);
  if (mode_for(tokens, wan_frames(frames)) == region::Mode::kNone) return;
  const region::Sizes sizes[] = {{{"batch", 1}, {"tokens", tokens}, {"text", text}}};
  Transformer::prewarm(sizes, adapters);
}

at::Tensor WanTransformer::run_blocks(at::Tensor x, const at::Tensor& text, const at::Tensor& time,
                                      const at::Tensor& rope, region::Mode mode, const parallel::Sequence* sequence,
                                      BlockCache* cache) const {
  PartSequence::Pass pass(parts().blocks.get());
  const auto& blocks = weights().blocks;
  const bool eager = mode == region::Mode::kNone;
  at::Tensor rows, table;
  if (!eager) {
    rows = tables_ + time.to(c10::ScalarType::Float);
    rows.select(1, 1).add_(1);  // the blocks multiply by 1 + scale
    rows.select(1, 4).add_(1);
    table = rope_rows(rope);
  }
  at::Tensor before = cache ? x : at::Tensor();
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    pass.begin(i);
    if (eager) {
      x = wan_block(std::move(x), text, time, rope, blocks[i], config_, sequence);
    } else {
      std::array<at::Tensor, 6> m;
      for (std::size_t row = 0; row < m.size(); ++row)
        m[row] = rows.narrow(0, static_cast<std::int64_t>(i), 1).narrow(1, static_cast<std::int64_t>(row), 1);
      std::vector<at::Tensor> outputs{cache && i < 2 ? at::Tensor() : x};  // no other code reads x; see BlockCache
      run_block(i, {&x, &text, &table, &m[0], &m[1], &m[2], &m[3], &m[4], &m[5]}, outputs, sequence);
      x = std::move(outputs[0]);
    }
    pass.end(i);
    if (cache && i == 0 && cache->skips(std::exchange(before, {}), x, sequence)) return x;
  }
  if (cache) cache->finish(x);
  return x;
}

at::Tensor WanTransformer::embed_text(const at::Tensor& prompt_embeds) const {
  const auto& linears = weights().linears;
  const at::Tensor inner =
      at::gelu(apply_linear(linears[WanLinear::kTextFirst], prompt_embeds.to(placement().dtype)), "tanh");
  return apply_linear(linears[WanLinear::kTextSecond], inner);
}

at::Tensor WanTransformer::rope(std::int64_t frames, std::int64_t rows, std::int64_t columns) const {
  return wan_rope_table(config_, frames, rows / 2, columns / 2, placement().device);
}

at::Tensor WanTransformer::velocity(const at::Tensor& latents, double timestep, const at::Tensor& text,
                                    const at::Tensor& rope, const parallel::Team& team, BlockCache* cache) const {
  if (latents.dim() != 5 || latents.size(0) != 1 || latents.size(1) != config_.in_channels ||
      latents.size(3) % 2 != 0 || latents.size(4) % 2 != 0) {
    std::string shape;
    for (const std::int64_t size : latents.sizes()) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
    fail(Code::kInvalidArgument, "latents have shape [" + shape + "]; this transformer needs [1, " +
                                     std::to_string(config_.in_channels) + ", frames, even rows, even columns]");
  }
  const std::int64_t frames = latents.size(2), rows = latents.size(3) / 2, columns = latents.size(4) / 2;
  const at::Tensor patches = latents.to(placement().dtype)
                                 .reshape({config_.in_channels, frames, rows, 2, columns, 2})
                                 .permute({1, 2, 4, 0, 3, 5})
                                 .reshape({1, frames * rows * columns, 4 * config_.in_channels});
  // With fewer tokens than ranks each rank computes all.
  std::optional<parallel::Sequence> sequence;
  if (team && patches.size(1) >= team.count) sequence.emplace(team, patches.size(1));
  const auto& [linears, tensors, blocks] = weights();
  const at::Tensor patch_weight = tensors[WanTensor::kPatchWeight].view({config_.width(), -1});
  at::Tensor x = at::linear(sequence ? sequence->own(patches) : patches, patch_weight, tensors[WanTensor::kPatchBias]);
  // The timestep is fp32, as in diffusers.
  const at::Tensor sines = sinusoids(
      at::full({1}, timestep, at::TensorOptions(c10::ScalarType::Float).device(placement().device)), config_.freq_dim);
  const at::Tensor conditioning =
      apply_linear(linears[WanLinear::kTimeSecond], at::silu(apply_linear(linears[WanLinear::kTimeFirst], sines)))
          .to(placement().dtype);
  const at::Tensor time =
      apply_linear(linears[WanLinear::kTimeProjection], at::silu(conditioning)).unflatten(1, {6, config_.width()});
  x = run_blocks(std::move(x), text, time, sequence ? sequence->own(rope) : rope,
                 mode_for(frames * rows * columns, wan_frames(frames)), sequence ? &*sequence : nullptr, cache);
  const std::vector<at::Tensor> head = (tensors[WanTensor::kTable] + conditioning.unsqueeze(1)).chunk(2, 1);
  x = apply_linear(linears[WanLinear::kPatchOut], wan_modulated_norm(x, head[0], head[1], config_.eps));
  return (sequence ? sequence->gather(x) : x)
      .view({frames, rows, columns, 2, 2, config_.out_channels})
      .permute({5, 0, 1, 3, 2, 4})
      .reshape({1, config_.out_channels, frames, 2 * rows, 2 * columns});
}

}  // namespace ditfleet::pipeline
