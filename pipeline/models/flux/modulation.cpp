#include "pipeline/models/flux/modulation.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/sin.h>

#include <cmath>

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kHalf = 128;  // of the 256 sinusoids
constexpr double kMaxPeriod = 10000;

at::Tensor apply(const LinearSlot& slot, const at::Tensor& x) { return at::linear(x, slot.weight, slot.bias); }

at::Tensor embed(const EmbedderSlots& slots, const at::Tensor& x) {
  return apply(slots.second, at::silu(apply(slots.first, x)));
}

// [n] → [n, 256] fp32: cosines, then sines.
at::Tensor sinusoids(const at::Tensor& values) {
  const auto fp32 = values.options().dtype(c10::ScalarType::Float);
  const at::Tensor frequencies =
      at::exp(-std::log(kMaxPeriod) * at::arange(0, kHalf, fp32) / static_cast<double>(kHalf));
  const at::Tensor angles = values.to(c10::ScalarType::Float).unsqueeze(1) * frequencies.unsqueeze(0);
  return at::cat({at::cos(angles), at::sin(angles)}, 1);
}

// linear(silu(conditioning)) as [n, rows, D], with one added to the rows that scale.
at::Tensor rows_of(const LinearSlot& slot, const at::Tensor& activated, std::int64_t rows,
                   std::initializer_list<std::int64_t> scales) {
  const at::Tensor flat = apply(slot, activated);
  at::Tensor table = flat.view({flat.size(0), rows, flat.size(1) / rows});
  for (auto row : scales) table.select(1, row).add_(1);
  return table;
}

// Rows first, first + 1, first + 2 of a step: shift, scale, gate.
Modulation triple(const at::Tensor& table, std::int64_t step, std::int64_t first) {
  const at::Tensor rows = table.select(0, step);
  const auto row = [&](std::int64_t i) { return rows.narrow(0, i, 1).unsqueeze(0); };
  return {row(first), row(first + 1), row(first + 2)};
}

}  // namespace

ModulationTable::ModulationTable(const FluxConfig& config, const FluxSlots& slots, const at::Tensor& timesteps,
                                 double guidance, const at::Tensor& pooled) {
  const auto type = pooled.scalar_type();
  const at::Tensor t = (timesteps.to(type) / 1000).to(type) * 1000;
  at::Tensor conditioning = embed(slots.time, sinusoids(t).to(type));
  if (config.guidance_embeds) {
    const at::Tensor g = at::full({1}, guidance, timesteps.options()).to(type) * 1000;
    conditioning = conditioning + embed(slots.guidance, sinusoids(g).to(type));
  }
  conditioning = conditioning + embed(slots.pooled, pooled);
  const at::Tensor activated = at::silu(conditioning);
  for (const auto& block : slots.double_blocks) {
    double_image_.push_back(rows_of(block.image.modulation, activated, 6, {1, 4}));
    double_text_.push_back(rows_of(block.text.modulation, activated, 6, {1, 4}));
  }
  for (const auto& block : slots.single_blocks) single_.push_back(rows_of(block.modulation, activated, 3, {1}));
  final_ = rows_of(slots.final_modulation, activated, 2, {0});
}

StepModulation ModulationTable::step(std::int64_t i) const {
  StepModulation m;
  for (std::size_t b = 0; b < double_image_.size(); ++b)
    m.double_blocks.push_back({triple(double_image_[b], i, 0), triple(double_image_[b], i, 3),
                               triple(double_text_[b], i, 0), triple(double_text_[b], i, 3)});
  for (const auto& table : single_) m.single_blocks.push_back(triple(table, i, 0));
  const at::Tensor rows = final_.select(0, i);
  m.final.scale = rows.narrow(0, 0, 1).unsqueeze(0);
  m.final.shift = rows.narrow(0, 1, 1).unsqueeze(0);
  return m;
}

}  // namespace ditfleet::pipeline
