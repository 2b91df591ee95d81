// Writes a safetensors file.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "shared/core/result.h"
#include "shared/safetensors/dtype.h"

namespace ditfleet::pipeline {

using safetensors::DType;

struct TensorToWrite {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;  // row-major, little-endian; borrowed for the call
};

// Returns the file's bytes, which do not depend on the order of `tensors`. kInvalidArgument: a tensor's bytes do not
// match its shape, or its name is empty, reserved, not UTF-8 or used twice; the message contains the name.
Result<std::string> encode_safetensors(std::vector<TensorToWrite> tensors,
                                       const std::map<std::string, std::string>& metadata = {});

// Writes the file atomically. Blocks. Errors: those of encode_safetensors(), kUnavailable (the file cannot be written).
Result<void> write_safetensors(const std::string& path, std::vector<TensorToWrite> tensors,
                               const std::map<std::string, std::string>& metadata = {});

}  // namespace ditfleet::pipeline
