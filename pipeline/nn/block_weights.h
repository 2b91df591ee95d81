// The weights of a model's repeated blocks, in the order of a compiled block's inputs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "pipeline/nn/linear.h"

namespace ditfleet::pipeline {

// A weight as it is stored: a tensor, or values that are computed before each use.
struct BlockWeight {
  at::Tensor tensor;
  std::shared_ptr<const QuantizedWeight> quantized = nullptr;

  BlockWeight(at::Tensor weight) : tensor(std::move(weight)) {}  // implicit, so that tables stay readable
  BlockWeight(std::shared_ptr<const QuantizedWeight> weight) : quantized(std::move(weight)) {}
};
using Weights = std::map<std::string, BlockWeight>;  // of a block, by input name

// Adds what a block computes a linear from: NAME.weight, NAME.bias, and NAME.scale if the product is in fp8.
void add_linear(Weights& weights, const std::string& name, const LinearSlot& slot);

// The bias with its changes, in the type that a compiled block reads: [out].
at::Tensor compiled_bias(const LinearSlot& slot);

// Memory for the values of one block's quantized weights. Blocks that never run at the same time share it.
class WeightMemory {
 public:
  // Tensors of these sizes and types, one after the other, valid until the next call.
  std::vector<at::Tensor> take(const std::vector<const QuantizedWeight*>& weights, c10::Device device);

 private:
  at::Tensor memory_;
};

// Not thread-safe if blocks have quantized weights: their values are in `memory` until the next take().
class BlockWeights {
 public:
  BlockWeights() = default;
  // `inputs`: of the compiled block. Inputs that each call gives, according to `is_given`, are undefined. Keeps the
  // tensors. Throws Failure (kInternal) if another input has no weight.
  BlockWeights(const std::vector<std::string>& inputs, const std::vector<Weights>& blocks,
               const std::function<bool(const std::string&)>& is_given, std::shared_ptr<WeightMemory> memory);

  std::size_t size() const { return rows_.size(); }
  // The inputs of a call. Computes the values of quantized weights on the calling thread's current stream.
  std::vector<at::Tensor> take(std::size_t block) const;

 private:
  struct Quantized {
    std::size_t input;
    std::shared_ptr<const QuantizedWeight> weight;
  };
  std::vector<at::Tensor> values_of(const std::vector<Quantized>& quantized) const;  // not computed yet

  std::vector<std::vector<at::Tensor>> rows_;
  std::vector<std::vector<Quantized>> quantized_;  // of each block
  std::shared_ptr<WeightMemory> memory_;
};

}  // namespace ditfleet::pipeline
