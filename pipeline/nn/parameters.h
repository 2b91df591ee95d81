// Loads the parameters of a model from its checkpoint into plain structs of tensors. The functions that compute a block
// receive these structs as arguments, so the N copies of a block share one function or compiled program.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/device/device.h"
#include "pipeline/nn/linear.h"
#include "pipeline/weights/checkpoint.h"

namespace ditfleet::pipeline {

struct NormSlot {
  at::Tensor weight, bias;  // [channels]
};

struct ConvSlot {
  at::Tensor weight;  // [out, in, k, k]
  at::Tensor bias;    // [out]
};

using Shape = std::vector<std::int64_t>;

// Returns a contiguous copy of a tensor in memory, on the placement's device and in its element type. Throws Failure
// (kDataCorrupt) for an element type that weights cannot have.
at::Tensor copy_to(Placement placement, const TensorView& view);

// Copies tensors from a checkpoint to the placement's device, in its element type. The caller owns the returned
// tensors, which are contiguous. All members throw Failure: kNotFound (a missing tensor), kDataCorrupt (a wrong shape
// or type, with the right one in the message, or a file that became shorter) or kUnavailable (it cannot be read). They
// throw LibTorch's exceptions when memory runs out. Not thread-safe.
class Parameters {
 public:
  Parameters(Checkpoint checkpoint, Placement placement);
  static Parameters open(const std::string& dir, Library library, Placement placement);

  bool contains(const std::string& name) const { return checkpoint_.contains(name); }
  std::vector<std::string> names() const { return checkpoint_.names(); }
  const std::string& dir() const { return checkpoint_.dir(); }

  at::Tensor tensor(const std::string& name, const Shape& shape);
  LinearSlot linear(const std::string& prefix, std::int64_t in, std::int64_t out, bool bias = true,
                    LoraColumns lora_columns = {});
  // Stacks the rows of several linears with the same input.
  LinearSlot stacked_linear(const std::vector<std::string>& prefixes, std::int64_t in, std::int64_t out_of_each,
                            bool bias = true, LoraColumns lora_columns = {});
  NormSlot norm(const std::string& prefix, std::int64_t channels);
  ConvSlot conv(const std::string& prefix, std::int64_t in, std::int64_t out, std::int64_t kernel);

  // The tensors with this prefix that were not requested, sorted by name. Such tensors mean that config.json describes
  // a smaller model than the weights belong to.
  std::vector<std::string> unused(std::string_view prefix) const;
  // Logs a warning if there are such tensors, as diffusers does.
  void warn_of_unused(std::string_view prefix) const;

  std::int64_t bytes() const { return bytes_; }  // device memory of all tensors that were returned
  Placement placement() const { return placement_; }

 private:
  Checkpoint checkpoint_;
  Placement placement_;
  at::Tensor staging_;  // bytes on the way to another device or element type
  std::set<std::string> taken_;
  std::int64_t bytes_ = 0;
};

}  // namespace ditfleet::pipeline
