// Gathers the tensors of a generation and writes them to a safetensors file.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "shared/core/result.h"

namespace ditfleet::pipeline {

// Keeps the tensors on the host until they are written.
class Dump {
 public:
  void add(const std::string& name, const at::Tensor& tensor);  // an undefined tensor is left out
  void add(const std::string& name, const std::vector<float>& values);
  void add(const std::string& name, const std::vector<std::int32_t>& ids);  // as int64 [1, n]
  // Errors: those of write_safetensors(). Throws Failure (kInternal) for another type than fp32, bf16 and int64.
  Result<void> write(const std::string& path, const std::map<std::string, std::string>& metadata) const;

 private:
  std::vector<std::pair<std::string, at::Tensor>> tensors_;
};

}  // namespace ditfleet::pipeline
