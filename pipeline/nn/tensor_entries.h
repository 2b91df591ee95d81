// Tensors as entries of the safetensors files that this program writes for itself, and back.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/weights/safetensors_writer.h"

namespace ditfleet::pipeline {

// Of tensors in host memory, contiguous, which must outlive the entries. Throws Failure (kInternal) for another type
// than fp32, bf16 and int64.
std::vector<TensorToWrite> entries_of(const std::map<std::string, at::Tensor>& tensors);

// Nothing for other types than those.
std::optional<c10::ScalarType> type_of_entry(DType dtype);

}  // namespace ditfleet::pipeline
