#include "pipeline/nn/linear.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>

namespace ditfleet::pipeline {

LinearSlot slot_with_lora_columns(std::int64_t out, std::int64_t in, LoraColumns lora_columns,
                                  const at::TensorOptions& options) {
  const at::Tensor wide = at::zeros({out, in + lora_columns.count}, options);
  return {.weight = wide.narrow(1, lora_columns.before ? lora_columns.count : 0, in),
          .bias = {},
          .wide = wide,
          .lora_columns = lora_columns};
}

at::Tensor lora_columns_of(const LinearSlot& slot) {
  if (slot.quantized) return slot.wide;
  return slot.wide.narrow(1, slot.lora_columns.before ? 0 : slot.weight.size(1), slot.lora_columns.count);
}

void add_part(PartSequence& parts, const std::vector<const LinearSlot*>& linears,
              const std::vector<at::Tensor>& tensors) {
  auto part = std::make_unique<WeightPart>(parts.device());
  for (const LinearSlot* slot : linears) {
    part->add(slot->weight);
    // Compiled blocks convert the bias of a weight that they dequantize, so it stays.
    if (!slot->quantized || slot->quantized->dynamic) part->add(slot->bias);
    if (!slot->quantized) continue;
    for (const QuantizedRows& rows : slot->quantized->parts) {
      part->add(rows.codes);
      part->add(rows.scales);
    }
  }
  for (const at::Tensor& tensor : tensors) part->add(tensor);
  parts.add(std::move(part));
}

at::Tensor bias_of(const LinearSlot& slot) {
  if (slot.bias_changes.empty()) return slot.bias;
  const auto& first = slot.bias_changes.front().values;
  const auto fp32 = first.options().dtype(c10::ScalarType::Float);
  at::Tensor bias =
      slot.bias.defined() ? slot.bias.to(fp32, /*non_blocking=*/false, /*copy=*/true) : at::zeros({slot.out()}, fp32);
  for (const BiasChange& change : slot.bias_changes)
    bias.narrow(0, change.first_row, change.values.size(0)).add_(change.values, change.scale);
  return bias.to(slot.bias.defined() ? slot.bias.scalar_type() : first.scalar_type());
}

at::Tensor apply_linear(const LinearSlot& slot, const at::Tensor& x) {
  const at::Tensor bias = bias_of(slot);
  at::Tensor out = slot.quantized ? quantized_linear(*slot.quantized, bias, x) : at::linear(x, slot.weight, bias);
  // Not mul_(): on a CPU that rounds the factor itself to the tensor's type before it multiplies, which Python's
  // operators do not.
  for (const LowRank& term : slot.low_rank)
    out.narrow(-1, term.first_row, term.up.size(0)).add_(at::linear(at::linear(x, term.down), term.up).mul(term.scale));
  return out;
}

void add_stacked(std::vector<NamedLinear>& linears, LinearSlot& slot, const std::vector<std::string>& names) {
  if (!slot.defined()) return;  // a part that this model does without
  const std::int64_t rows = slot.out() / static_cast<std::int64_t>(names.size());
  for (std::size_t i = 0; i < names.size(); ++i)
    linears.push_back({names[i], &slot, static_cast<std::int64_t>(i) * rows, rows});
}

}  // namespace ditfleet::pipeline
