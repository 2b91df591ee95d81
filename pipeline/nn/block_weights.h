// The weights of a model's repeated blocks, in the order of a compiled block's inputs.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "pipeline/device/failure.h"

namespace ditfleet::pipeline {

using Weights = std::map<std::string, at::Tensor>;  // of a block, by input name

// One row per block. Inputs that each call gives, according to `is_given`, are undefined. Keeps the tensors. Throws
// Failure (kInternal) if another input has no weight.
template <class IsGiven>
std::vector<std::vector<at::Tensor>> weight_rows(const std::vector<std::string>& inputs,
                                                 const std::vector<Weights>& blocks, const IsGiven& is_given) {
  std::vector<std::vector<at::Tensor>> rows;
  for (const Weights& weights : blocks) {
    auto& row = rows.emplace_back();
    for (const std::string& name : inputs) {
      const auto at = weights.find(name);
      if (at == weights.end() && !is_given(name)) fail(Code::kInternal, "no parameter has the name " + name);
      row.push_back(is_given(name) ? at::Tensor() : at->second);
    }
  }
  return rows;
}

}  // namespace ditfleet::pipeline
