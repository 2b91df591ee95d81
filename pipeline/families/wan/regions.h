// Wan's blocks as compiled regions. Both experts share them. Blocks whose linears are stored in different ways have
// regions of their own.
#pragma once

#include <memory>
#include <vector>

#include "pipeline/families/wan/slots.h"
#include "pipeline/nn/block_weights.h"
#include "pipeline/region/run/region.h"

namespace ditfleet::pipeline {

class WanRegions {
 public:
  WanRegions(const WanRegions&) = delete;
  WanRegions& operator=(const WanRegions&) = delete;
  // `experts`: transformers that fit `config`. Keeps their tensors. Compiles all programs; with dynamic off the first
  // call compiles instead. Throws what Region::prepare throws.
  WanRegions(const WanConfig& config, const std::vector<const WanSlots*>& experts, Placement placement,
             std::shared_ptr<region::RegionHost> host);

  // The programs that a constructor compiles. Of `slots` only the linears' formats are read.
  static std::vector<region::Program> programs(const WanConfig& config, const WanSlots& slots, Placement placement);

  // The mode of calls with this number of tokens and frames.
  region::Mode mode_for(std::int64_t tokens, std::int64_t frames) const {
    return region::mode_for(host_->options, tokens, frames);
  }
  // Prewarms library plans for these sizes in the background. Does not block. Thread-safe.
  void prewarm(std::int64_t tokens, std::int64_t text) const;
  // Counts a fallback to eager blocks. Throws what RegionHost::fall_back throws.
  void leave(const std::string& reason, const std::string& problem) const { host_->fall_back("wan", reason, problem); }

  // Replaces x [1, S, D], which no other code reads, by the output of a block. `rows`: [1, 6, D] fp32, see kWanRows;
  // 1 is added to the scales. `rope`: from rope_rows(). Thread-safe unless weights are quantized.
  void block(std::size_t expert, std::size_t index, at::Tensor& x, const at::Tensor& text, const at::Tensor& rows,
             const at::Tensor& rope, region::Mode mode) const;

  // A view of wan_rope_table()'s result as input of regions: [tokens, head_dim] fp32, cosine and sine of each pair.
  static at::Tensor rope_rows(const at::Tensor& rope);

 private:
  // A region and the weights of the blocks that run it.
  struct Table {
    std::unique_ptr<region::Region> region;
    BlockWeights weights;
    std::vector<std::size_t> given;  // positions among the inputs of what a call gives, in order
  };
  struct Block {
    const Table* table = nullptr;
    std::size_t row = 0;
  };

  const Placement placement_;
  const std::shared_ptr<region::RegionHost> host_;
  std::vector<std::unique_ptr<Table>> tables_;
  std::vector<std::vector<Block>> experts_;
};

}  // namespace ditfleet::pipeline
