#include "pipeline/families/flux/modulation.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/silu.h>

#include "pipeline/nn/rope.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kSinusoids = 256;

at::Tensor embed(const TransformerWeights& weights, std::size_t embedder, const at::Tensor& x) {
  return apply_linear(weights.linears[embedder + 1], at::silu(apply_linear(weights.linears[embedder], x)));
}

// linear(silu(conditioning)) as [n, rows, D], with one added to the rows that scale.
at::Tensor rows_of(const LinearSlot& slot, const at::Tensor& activated, std::int64_t rows,
                   std::initializer_list<std::int64_t> scales) {
  const at::Tensor flat = apply_linear(slot, activated);
  at::Tensor table = flat.view({flat.size(0), rows, flat.size(1) / rows});
  for (auto row : scales) table.select(1, row).add_(1);
  return table;
}

// [batch, rows, D] → row i as [batch, 1, D].
at::Tensor row_of(const at::Tensor& all, std::int64_t i) { return all.narrow(1, i, 1); }

// Rows first, first + 1, first + 2 of a step: shift, scale, gate.
Modulation triple(const at::Tensor& all, std::int64_t first) {
  return {row_of(all, first), row_of(all, first + 1), row_of(all, first + 2)};
}

}  // namespace

ModulationTable::ModulationTable(const FluxConfig& config, const TransformerWeights& weights,
                                 const at::Tensor& timesteps, double guidance, const at::Tensor& pooled,
                                 PartSequence* sequence)
    : config_(config) {
  const auto type = pooled.scalar_type();
  const at::Tensor t = (timesteps.to(type) / 1000).to(type) * 1000;
  at::Tensor conditioning = embed(weights, FluxLinear::kTime, sinusoids(t, kSinusoids).to(type));
  if (config.guidance_embeds) {
    const at::Tensor g = at::full({1}, guidance, timesteps.options()).to(type) * 1000;
    conditioning = conditioning + embed(weights, FluxLinear::kGuidance, sinusoids(g, kSinusoids).to(type));
  }
  conditioning = conditioning + embed(weights, FluxLinear::kPooled, pooled);
  const at::Tensor activated = at::silu(conditioning);
  std::vector<at::Tensor> parts;
  PartSequence::Pass pass(sequence);
  for (std::size_t i = 0; i < weights.blocks.size(); ++i) {
    const auto& linears = weights.blocks[i].linears;
    pass.begin(i);
    if (weights.blocks[i].spec == 0) {
      parts.push_back(rows_of(linears[FluxDoubleLinear::kImageModulation], activated, 6, {1, 4}));
      parts.push_back(rows_of(linears[FluxDoubleLinear::kTextModulation], activated, 6, {1, 4}));
    } else {
      parts.push_back(rows_of(linears[FluxSingleLinear::kModulation], activated, 3, {1}));
    }
    pass.end(i);
  }
  parts.push_back(rows_of(weights.linears[FluxLinear::kFinalModulation], activated, 2, {0}));
  table_ = at::cat(parts, 1);
}

StepModulation ModulationTable::views(const at::Tensor& all, const FluxConfig& config) {
  StepModulation m;
  m.all = all;
  std::int64_t at = 0;
  for (std::int64_t b = 0; b < config.num_layers; ++b, at += 12)
    m.double_blocks.push_back({triple(all, at), triple(all, at + 3), triple(all, at + 6), triple(all, at + 9)});
  for (std::int64_t b = 0; b < config.num_single_layers; ++b, at += 3) m.single_blocks.push_back(triple(all, at));
  m.final.scale = row_of(all, at);
  m.final.shift = row_of(all, at + 1);
  return m;
}

}  // namespace ditfleet::pipeline
