#include "pipeline/nn/block_weights.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "pipeline/device/failure.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kAlignment = 256;  // bytes

std::int64_t bytes_of(const QuantizedWeight& weight) {
  const auto element = static_cast<std::int64_t>(c10::elementSize(weight.compute));
  return (weight.out * weight.in * element + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

void add_linear(Weights& weights, const std::string& name, const LinearSlot& slot) {
  if (!slot.quantized) {
    weights.emplace(name + ".weight", slot.weight);
  } else if (slot.quantized->dynamic) {
    weights.emplace(name + ".weight", slot.quantized->parts.front().codes);
    weights.emplace(name + ".scale", slot.quantized->parts.front().scales);
  } else {
    weights.emplace(name + ".weight", slot.quantized);
  }
  if (slot.bias.defined()) weights.emplace(name + ".bias", compiled_bias(slot));
}

at::Tensor compiled_bias(const LinearSlot& slot) {
  const at::Tensor bias = bias_of(slot);
  return slot.quantized && !slot.quantized->dynamic ? bias.to(slot.quantized->compute) : bias;
}

std::vector<at::Tensor> WeightMemory::take(const std::vector<const QuantizedWeight*>& weights, c10::Device device) {
  std::int64_t total = 0;
  for (const QuantizedWeight* weight : weights) total += bytes_of(*weight);
  if (!memory_.defined() || memory_.numel() < total)
    memory_ = at::empty({total}, at::TensorOptions(c10::ScalarType::Byte).device(device));
  std::vector<at::Tensor> taken;
  std::int64_t begin = 0;
  for (const QuantizedWeight* weight : weights) {
    const auto values = static_cast<std::int64_t>(c10::elementSize(weight->compute)) * weight->out * weight->in;
    taken.push_back(memory_.narrow(0, begin, values).view(weight->compute).view({weight->out, weight->in}));
    begin += bytes_of(*weight);
  }
  return taken;
}

BlockWeights::BlockWeights(const std::vector<std::string>& inputs, const std::vector<Weights>& blocks,
                           const std::function<bool(const std::string&)>& is_given,
                           std::shared_ptr<WeightMemory> memory)
    : memory_(std::move(memory)) {
  for (const Weights& weights : blocks) {
    auto& row = rows_.emplace_back(inputs.size());
    auto& quantized = quantized_.emplace_back();
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (is_given(inputs[i])) continue;
      const auto at = weights.find(inputs[i]);
      if (at == weights.end()) fail(Code::kInternal, "no parameter has the name " + inputs[i]);
      row[i] = at->second.tensor;
      if (at->second.quantized) quantized.push_back({i, at->second.quantized});
    }
    values_of(quantized);  // allocates it before the tensors of requests, between which it would leave a gap
  }
}

std::vector<at::Tensor> BlockWeights::values_of(const std::vector<Quantized>& quantized) const {
  if (quantized.empty()) return {};
  std::vector<const QuantizedWeight*> weights;
  for (const Quantized& one : quantized) weights.push_back(one.weight.get());
  return memory_->take(weights, weights.front()->parts.front().codes.device());
}

std::vector<at::Tensor> BlockWeights::take(std::size_t block) const {
  std::vector<at::Tensor> inputs = rows_[block];
  const auto& quantized = quantized_[block];
  const auto values = values_of(quantized);
  for (std::size_t i = 0; i < quantized.size(); ++i) {
    dequantize(*quantized[i].weight, values[i]);
    inputs[quantized[i].input] = values[i];
  }
  return inputs;
}

}  // namespace ditfleet::pipeline
