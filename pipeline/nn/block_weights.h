// The weights of a model's repeated blocks, in the order of a compiled block's inputs.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace ditfleet::pipeline {

// Immutable and thread-safe. All weights are resident on the device.
class BlockWeights {
 public:
  BlockWeights() = default;
  // `inputs`: names of a region's inputs. `blocks`: the weights of each block by input name. Keeps the tensors.
  BlockWeights(const std::vector<std::string>& inputs, const std::vector<std::map<std::string, at::Tensor>>& blocks) {
    for (const auto& weights : blocks) {
      auto& row = rows_.emplace_back();
      for (const std::string& name : inputs) {
        const auto at = weights.find(name);
        row.push_back(at == weights.end() ? at::Tensor() : at->second);
      }
    }
  }

  std::size_t size() const { return rows_.size(); }

  // The inputs for one call of a block. Inputs that are not weights are undefined; the caller sets them.
  std::vector<at::Tensor> acquire(std::size_t block) const { return rows_[block]; }

 private:
  std::vector<std::vector<at::Tensor>> rows_;
};

}  // namespace ditfleet::pipeline
