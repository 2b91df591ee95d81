// Parameters of a model, taken out of its checkpoint into slots. A slot is a plain tensor in a plain struct:
// the functions that compute a block take slots as arguments, so that the N copies of a block share one program
// (the region compiler's too) with N sets of slots.
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

// A contiguous copy of a tensor of a file, where the pipeline runs and in its element type. Throws Failure
// (kDataCorrupt) for an element type that weights do not come in.
at::Tensor copy_to(Placement placement, const TensorView& view);

// Copies tensors out of a checkpoint to where the pipeline runs, in its element type. Everything it returns is
// owned by the caller and contiguous. All members throw Failure: kNotFound names the folder and the tensor that
// is missing, kDataCorrupt the tensor whose shape or type is wrong, with what it must be; kOutOfMemory travels as
// LibTorch's own exception. Not thread safe.
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
  // Several linears of one input as one: their rows one after the other.
  LinearSlot stacked_linear(const std::vector<std::string>& prefixes, std::int64_t in, std::int64_t out_of_each,
                            bool bias = true, LoraColumns lora_columns = {});
  NormSlot norm(const std::string& prefix, std::int64_t channels);
  ConvSlot conv(const std::string& prefix, std::int64_t in, std::int64_t out, std::int64_t kernel);

  // Tensors whose names begin so that nobody took, in order: config.json tells of a smaller model than the weights are
  // of.
  std::vector<std::string> unused(std::string_view prefix) const;
  // Warns in the log where there are any, as diffusers does.
  void warn_of_unused(std::string_view prefix) const;

  std::int64_t bytes() const { return bytes_; }  // of what was taken so far, as it lies in memory
  Placement placement() const { return placement_; }

 private:
  Checkpoint checkpoint_;
  Placement placement_;
  std::set<std::string> taken_;
  std::int64_t bytes_ = 0;
};

}  // namespace ditfleet::pipeline
