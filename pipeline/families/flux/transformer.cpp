#include "pipeline/families/flux/transformer.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <spdlog/spdlog.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

#include "pipeline/families/flux/blocks.h"
#include "pipeline/families/flux/rope.h"
#include "pipeline/region/run/graphs.h"
#include "pipeline/region/run/region_host.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::size_t kMostGraphs = 16;  // buckets; each keeps its inputs, a few MB

}  // namespace

FluxTransformer FluxTransformer::load(const TransformerSource& source, Placement placement) {
  FluxTransformer made(read_flux_config(ConfigFile(source.files.dir + "/config.json")), std::move(placement));
  made.Transformer::load(source, made.config_.heads);
  return made;
}

FluxTransformer::FluxTransformer(FluxConfig config, TransformerWeights weights, Placement placement,
                                 const std::shared_ptr<region::RegionHost>& regions, bool f8_attention)
    : FluxTransformer(config, std::move(placement)) {
  if (f8_attention) use_f8_attention();
  use(std::move(weights));
  Transformer::compile({this}, regions);
}

void FluxTransformer::compiled_blocks() {
  if (placement().device.is_cuda()) graphs_ = region::make_graphs(placement().device, kMostGraphs);
}

// The first use of cuBLAS, of cuDNN and of each of LibTorch's kernels loads it: half a second in all. So whatever a
// request needs beside its blocks is done here once, on next to nothing.
void FluxTransformer::open_libraries(const region::RegionHost& host) const {
  const Placement where = placement();
  const c10::InferenceMode inference(true);
  const c10::DeviceGuard guard(where.device);
  region::open_attention(where.device, where.dtype, config_.heads, config_.head_dim, host.attention,
                         host.direct_attention.get());
  const auto options = at::TensorOptions(where.dtype).device(where.device);
  const auto& linears = weights().linears;
  const at::Tensor text = embed_text(at::zeros({1, 8, config_.joint_attention_dim}, options));
  const at::Tensor image = apply_linear(linears[FluxLinear::kImageIn], at::zeros({1, 4, config_.in_channels}, options));
  const auto rows = modulation(at::ones({1}, options.dtype(c10::ScalarType::Float)), 1,
                               at::zeros({1, config_.pooled_projection_dim}, options))
                        .step(0);
  rope_table(config_, 8, {{2, 2}}, where);
  apply_linear(linears[FluxLinear::kImageOut], modulated_norm(at::cat({text, image}, 1).slice(1, 8), rows.final));
  synchronize(where.device);
}

// To a library a picture's tokens and both streams' together are one shape.
void FluxTransformer::prewarm(std::int64_t text_tokens, std::int64_t image_tokens) const {
  if (mode_for(image_tokens, 1) == region::Mode::kNone) return;
  const region::Sizes sizes[] = {{{"batch", 1}, {"text", text_tokens}, {"image", image_tokens}},
                                 {{"batch", 1}, {"tokens", text_tokens + image_tokens}}};
  Transformer::prewarm(sizes, /*adapters=*/false);
}

ModulationTable FluxTransformer::modulation(const at::Tensor& timesteps, double guidance,
                                            const at::Tensor& pooled) const {
  return ModulationTable(config_, weights(), timesteps, guidance, pooled, parts().apart.get());
}

at::Tensor FluxTransformer::embed_text(const at::Tensor& prompt_embeds) const {
  return apply_linear(weights().linears[FluxLinear::kTextIn], prompt_embeds);
}

at::Tensor FluxTransformer::velocity(const at::Tensor& latents, const at::Tensor& text,
                                     const StepModulation& modulation, const at::Tensor& rope,
                                     const parallel::Team& team, BlockCache* cache) const {
  const region::Mode mode = mode_for(latents.size(1), 1);  // images have one frame
  // A recording keeps addresses. Adapters of the first and the last linear are read from their slots, which change.
  const auto& linears = weights().linears;
  const bool reads_slots =
      !linears[FluxLinear::kImageIn].low_rank.empty() || !linears[FluxLinear::kImageOut].low_rank.empty();
  const PartSequence* const blocks = parts().blocks.get();
  const bool blocks_stay = !blocks || blocks->all_stay();
  if (graphs_ && region::uses_graphs(mode) && !blocks_stay) {
    static std::once_flag told;
    std::call_once(told, [] { spdlog::warn("blocks are copied in each step, so CUDA graphs are not used"); });
  }
  if (!graphs_ || !region::uses_graphs(mode) || reads_slots || !blocks_stay || team || cache)
    return velocity(latents, text, modulation, rope, mode, team, cache);
  std::vector<std::int64_t> bucket{static_cast<std::int64_t>(mode), blocks ? blocks->moves() : 0};
  for (const at::Tensor* t : {&latents, &text}) bucket.insert(bucket.end(), t->sizes().begin(), t->sizes().end());
  join_adapters();
  if (adapters())
    for (const auto& operands : adapters()->operands) bucket.push_back(operands.adapter.size(1));
  return graphs_->run(bucket, {latents, text, modulation.all, rope}, [&](const std::vector<at::Tensor>& in) {
    return velocity(in[0], in[1], ModulationTable::views(in[2], config_), in[3], mode, {}, nullptr);
  });
}

at::Tensor FluxTransformer::velocity(const at::Tensor& latents, const at::Tensor& text_tokens,
                                     const StepModulation& modulation, const at::Tensor& rope, region::Mode mode,
                                     const parallel::Team& team, BlockCache* cache) const {
  // With fewer tokens than ranks each rank computes all.
  if (team && std::min(latents.size(1), text_tokens.size(1)) < team.count)
    return velocity(latents, text_tokens, modulation, rope, mode, {}, cache);
  std::optional<parallel::Sequence> of_image, sequence;
  at::Tensor own_rope = rope, text = text_tokens;
  if (team) {
    const std::int64_t text_count = text_tokens.size(1);
    const parallel::Sequence of_text(team, text_count);
    of_image.emplace(team, latents.size(1));
    sequence.emplace(of_text, *of_image);
    own_rope = at::cat({of_text.own(rope.slice(1, 0, text_count)), of_image->own(rope.slice(1, text_count))}, 1);
    text = of_text.own(text_tokens);
  }
  const parallel::Sequence* const shared = sequence ? &*sequence : nullptr;
  const BlockGeometry geometry{config_.heads, config_.head_dim};
  const bool eager = mode == region::Mode::kNone;
  const at::Tensor rows = eager ? at::Tensor() : rope_rows(own_rope);
  const auto& linears = weights().linears;
  at::Tensor image = apply_linear(linears[FluxLinear::kImageIn], of_image ? of_image->own(latents) : latents), tokens;
  PartSequence::Pass pass(parts().blocks.get());
  const std::size_t doubles = modulation.double_blocks.size();
  at::Tensor before = cache ? image : at::Tensor();
  for (std::size_t i = 0; i < weights().blocks.size(); ++i) {
    const TransformerBlock& block = weights().blocks[i];
    const bool keeps_inputs = cache && i < 2;  // see BlockCache
    if (i == doubles) tokens = at::cat({text, image}, 1);
    pass.begin(i);
    if (i < doubles) {
      const DoubleModulation& m = modulation.double_blocks[i];
      if (eager) {
        double_block(image, text, block, m, own_rope, geometry, shared);
      } else {
        // No other code reads the memory of an output that is given. The first block's text is the caller's, who needs
        // it for the next step.
        std::vector<at::Tensor> outputs{keeps_inputs ? at::Tensor() : image, i > 0 ? text : at::Tensor()};
        run_block(
            i,
            {&image, &text, &rows, &m.image_attention.shift, &m.image_attention.scale, &m.image_attention.gate,
             &m.image_mlp.shift, &m.image_mlp.scale, &m.image_mlp.gate, &m.text_attention.shift,
             &m.text_attention.scale, &m.text_attention.gate, &m.text_mlp.shift, &m.text_mlp.scale, &m.text_mlp.gate},
            outputs, shared);
        image = std::move(outputs[0]);
        text = std::move(outputs[1]);
      }
    } else {
      const Modulation& m = modulation.single_blocks[i - doubles];
      if (eager) {
        single_block(tokens, block, m, own_rope, geometry, shared);
      } else {
        std::vector<at::Tensor> outputs{keeps_inputs ? at::Tensor() : tokens};
        run_block(i, {&tokens, &rows, &m.shift, &m.scale, &m.gate}, outputs, shared);
        tokens = std::move(outputs[0]);
      }
    }
    pass.end(i);
    if (tokens.defined()) image = tokens.slice(1, text.size(1));
    if (cache && i == 0 && cache->skips(std::exchange(before, {}), image, of_image ? &*of_image : nullptr)) {
      cache = nullptr;
      break;
    }
  }
  if (cache) cache->finish(image);
  image = apply_linear(linears[FluxLinear::kImageOut], modulated_norm(image, modulation.final));
  return of_image ? of_image->gather(image) : image;
}

}  // namespace ditfleet::pipeline
