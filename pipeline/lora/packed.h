// An adapter in host memory, packed so that one copy brings it to a device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pipeline/device/device.h"
#include "pipeline/lora/names.h"

namespace ditfleet::pipeline {

struct PackedAdapter {
  // One A and the rows of B that change one matrix.
  struct Term {
    LoraPart part;
    std::size_t slot;             // as in the LoraBase
    std::int64_t down_at, up_at;  // where A [rank, in] and B [rows, rank] begin in `values`, row-major
    std::int64_t rank, in, rows, first_row;
    double scale;
  };
  at::Tensor values;  // 1-D, in the pipeline's element type, all of the terms finite; pinned where the device is a GPU
  std::vector<Term> terms;
  bool changes_text = false;  // has terms for CLIP or T5

  std::int64_t bytes() const { return static_cast<std::int64_t>(values.nbytes()); }
};

// Elements between the beginnings of two matrices are a multiple of this: what a GPU's vectors want.
inline constexpr std::int64_t kPackedAlignment = 16;

// Reads and checks a file. Throws Failure as read_lora_file() fails and, kInvalidArgument, for weights that are beyond
// the model's element type; LibTorch's own exceptions when memory runs out.
std::shared_ptr<const PackedAdapter> read_packed_adapter(const std::string& path, const LoraNames& names,
                                                         std::int64_t max_rank, Placement placement);

// Elements that any adapter of this base takes at most, with ranks up to max_rank.
std::int64_t most_packed_elements(const LoraBase& base, std::int64_t max_rank);

}  // namespace ditfleet::pipeline
