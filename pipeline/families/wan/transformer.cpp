#include "pipeline/families/wan/transformer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <optional>
#include <utility>

#include "pipeline/device/failure.h"
#include "pipeline/families/wan/rope.h"

namespace ditfleet::pipeline {
namespace {

constexpr auto kFp32 = c10::ScalarType::Float;

// The blocks' modulation rows, which multiply by 1 + scale: of tables [N, 6, D] and times [n, 6, D], [N, 6, n, D].
at::Tensor modulation_rows(const at::Tensor& tables, const at::Tensor& times) {
  at::Tensor rows = tables.unsqueeze(2) + times.to(kFp32).transpose(0, 1);
  rows.select(1, 1).add_(1);
  rows.select(1, 4).add_(1);
  return rows;
}

// LayerNorm without parameters, then x · (1 + scale) + shift. shift and scale: [1, 1, D] fp32.
at::Tensor modulated_norm(const at::Tensor& x, const at::Tensor& shift, const at::Tensor& scale, double eps) {
  return at::layer_norm(x.to(kFp32), {x.size(-1)}, {}, {}, eps).mul_(1 + scale).add_(shift).to(x.scalar_type());
}

}  // namespace

WanTransformer WanTransformer::load(const TransformerSource& source, Placement placement, bool expand_timesteps) {
  WanTransformer made(read_wan_config(ConfigFile(source.files.dir + "/config.json"), expand_timesteps),
                      std::move(placement));
  made.Transformer::load(source, made.config_.heads);
  return made;
}

void WanTransformer::compiled_blocks() {
  std::vector<at::Tensor> tables;
  for (const TransformerBlock& block : weights().blocks) tables.push_back(block.tensors[WanBlockTensor::kTable]);
  tables_ = at::cat(tables);
}

void WanTransformer::prewarm(std::int64_t frames, std::int64_t rows, std::int64_t columns, std::int64_t text,
                             std::int64_t image, std::int64_t still_frames, bool adapters) const {
  const std::int64_t of_frame = (rows / 2) * (columns / 2), still = still_frames * of_frame, tokens = frames * of_frame;
  if (mode_for(tokens, wan_frames(frames)) == region::Mode::kNone) return;
  region::Sizes sizes[] = {{{"batch", 1}, {"tokens", tokens - still}, {"text", text}}};
  if (config_.expand_timesteps) sizes[0]["still"] = still;
  if (config_.image_dim > 0) sizes[0]["image"] = image;
  Transformer::prewarm(sizes, adapters);
}

at::Tensor WanTransformer::run_blocks(at::Tensor x, const WanInputs& inputs, const at::Tensor& time,
                                      const at::Tensor& rope, std::int64_t still, region::Mode mode,
                                      const parallel::Sequence* sequence, BlockCache* cache) const {
  const at::Tensor &text = inputs.text, &image = inputs.image;
  PartSequence::Pass pass(parts().blocks.get());
  const auto& blocks = weights().blocks;
  const bool eager = mode == region::Mode::kNone;
  const at::Tensor all_rows = eager ? at::Tensor() : modulation_rows(tables_, time), table = rope_rows(rope);
  at::Tensor before = cache ? x : at::Tensor();
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    pass.begin(i);
    const at::Tensor rows = eager ? modulation_rows(blocks[i].tensors[WanBlockTensor::kTable], time)
                                  : all_rows.narrow(0, static_cast<std::int64_t>(i), 1);
    std::array<at::Tensor, 6> m;
    for (std::size_t row = 0; row < m.size(); ++row) m[row] = rows.select(1, static_cast<std::int64_t>(row));
    const auto run = [&](std::initializer_list<const at::Tensor*> given, std::vector<at::Tensor>& outputs) {
      if (eager)
        outputs = run_eagerly(i, given, sequence);
      else
        run_block(i, given, outputs, sequence);
    };
    const bool keeps_x = cache && i < 2;  // else no other code reads x; see BlockCache
    if (config_.expand_timesteps) {
      const auto parts = [&] { return std::vector{x.narrow(1, 0, still), x.narrow(1, still, x.size(1) - still)}; };
      const std::vector<at::Tensor> in = parts();
      if (keeps_x && !eager) x = at::empty_like(x);
      std::vector<at::Tensor> outputs = parts();
      run({&in[0], &in[1], &text, &table, &m[0], &m[1], &m[2], &m[3], &m[4], &m[5]}, outputs);
      if (eager) x = at::cat(outputs, 1);
    } else {
      std::vector<at::Tensor> outputs{keeps_x ? at::Tensor() : x};
      if (config_.image_dim > 0)
        run({&x, &text, &table, &image, &m[0], &m[1], &m[2], &m[3], &m[4], &m[5]}, outputs);
      else
        run({&x, &text, &table, &m[0], &m[1], &m[2], &m[3], &m[4], &m[5]}, outputs);
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

at::Tensor WanTransformer::embed_image(const at::Tensor& image_embeds) const {
  constexpr double kEps = 1e-5;
  const auto& [linears, tensors, blocks] = weights();
  const auto norm = [&](const at::Tensor& of, std::size_t weight, std::size_t bias) {
    return at::layer_norm(of.to(kFp32), {of.size(-1)}, tensors[weight], tensors[bias], kEps).to(of.scalar_type());
  };
  at::Tensor x = image_embeds.to(placement().dtype).reshape({1, -1, config_.image_dim});
  if (config_.pos_embed_seq_len > 0) {
    if (x.size(1) != config_.pos_embed_seq_len)
      fail(Code::kInvalidArgument, "the images have " + std::to_string(x.size(1)) + " tokens; this transformer needs " +
                                       std::to_string(config_.pos_embed_seq_len) + ", of a first and a last image");
    x = x + tensors[WanTensor::kImagePositions];
  }
  x = norm(x, WanTensor::kImageWeight, WanTensor::kImageBias);
  x = apply_linear(linears[WanLinear::kImageSecond], at::gelu(apply_linear(linears[WanLinear::kImageFirst], x)));
  return norm(x, WanTensor::kImageOutWeight, WanTensor::kImageOutBias);
}

at::Tensor WanTransformer::rope(std::int64_t frames, std::int64_t rows, std::int64_t columns) const {
  return wan_rope_table(config_, frames, rows / 2, columns / 2, placement().device);
}

at::Tensor WanTransformer::velocity(const at::Tensor& latents, double timestep, const WanInputs& inputs,
                                    const parallel::Team& team, BlockCache* cache) const {
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
  // The timesteps are fp32, as in diffusers. It computes them for each token.
  const auto fp32 = at::TensorOptions(kFp32).device(placement().device);
  at::Tensor timesteps = at::full({1}, timestep, fp32);
  if (config_.expand_timesteps) timesteps = at::cat({at::zeros({1}, fp32), timesteps});
  const at::Tensor sines = sinusoids(timesteps, config_.freq_dim);
  const at::Tensor conditioning =
      apply_linear(linears[WanLinear::kTimeSecond], at::silu(apply_linear(linears[WanLinear::kTimeFirst], sines)))
          .to(placement().dtype);
  const at::Tensor time =
      apply_linear(linears[WanLinear::kTimeProjection], at::silu(conditioning)).unflatten(1, {6, config_.width()});
  const std::int64_t all_still = inputs.still_frames * rows * columns,
                     still = sequence ? sequence->own_before(all_still) : all_still;
  x = run_blocks(std::move(x), inputs, time, sequence ? sequence->own(inputs.rope) : inputs.rope, still,
                 mode_for(frames * rows * columns, wan_frames(frames)), sequence ? &*sequence : nullptr, cache);
  std::vector<at::Tensor> normed;  // [1, tokens, D], of the still ones and of the others
  for (const at::Tensor& one : (tensors[WanTensor::kTable] + conditioning.unsqueeze(1)).split(1)) {
    const bool of_still = config_.expand_timesteps && normed.empty();
    const std::vector<at::Tensor> rows_of = one.chunk(2, 1);
    normed.push_back(modulated_norm(of_still ? x.narrow(1, 0, still) : x.narrow(1, still, x.size(1) - still),
                                    rows_of[0], rows_of[1], config_.eps));
  }
  x = apply_linear(linears[WanLinear::kPatchOut], normed.size() > 1 ? at::cat(normed, 1) : normed[0]);
  return (sequence ? sequence->gather(x) : x)
      .view({frames, rows, columns, 2, 2, config_.out_channels})
      .permute({5, 0, 1, 3, 2, 4})
      .reshape({1, config_.out_channels, frames, 2 * rows, 2 * columns});
}

}  // namespace ditfleet::pipeline
