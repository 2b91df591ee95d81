// Wan's blocks as compiled regions, with and without adapters. Both experts share them. Blocks whose linears are stored
// in different ways have regions of their own.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "pipeline/families/wan/slots.h"
#include "pipeline/nn/adapter_columns.h"
#include "pipeline/nn/block_weights.h"
#include "pipeline/region/run/region.h"

namespace ditfleet::pipeline {

class WanRegions {
 public:
  WanRegions(const WanRegions&) = delete;
  WanRegions& operator=(const WanRegions&) = delete;
  struct Expert {
    const WanSlots* slots;
    std::shared_ptr<PartSequence> parts;  // a part with each block's linears
  };
  // `experts`: transformers that fit `config`. Keeps their tensors. Compiles all programs; with dynamic off the first
  // call compiles instead. Compiles the programs with adapters only if columns are reserved. Throws what
  // Region::prepare throws.
  WanRegions(const WanConfig& config, const std::vector<Expert>& experts, Placement placement,
             std::shared_ptr<region::RegionHost> host);

  // The programs that a constructor with columns compiles. Of `slots` only the linears' formats are read.
  static std::vector<region::Program> programs(const WanConfig& config, const WanSlots& slots, Placement placement);

  // The mode of calls with this number of tokens and frames.
  region::Mode mode_for(std::int64_t tokens, std::int64_t frames) const {
    return region::mode_for(host_->options, tokens, frames);
  }
  // Prewarms library plans for these sizes in the background, on request also for blocks with adapters. Does not block.
  // Thread-safe.
  void prewarm(std::int64_t tokens, std::int64_t text, bool adapters) const;
  // Counts a fallback to eager blocks. Throws what RegionHost::fall_back throws.
  void leave(const std::string& reason, const std::string& problem) const { host_->fall_back("wan", reason, problem); }

  // Of the expert's blocks; null if no columns are reserved.
  AdapterColumns* columns(std::size_t expert) const { return columns_[expert].get(); }
  static AdapterColumns::Terms terms_of(const WanSlots& slots);

  // Replaces x [1, S, D], which no other code reads, by the output of a block. `rows`: [1, 6, D] fp32, see kWanRows;
  // 1 is added to the scales. `rope`: from rope_rows(). `slots`: of the block, with changes of biases. `adapters`:
  // what columns() have loaded, or null. `sequence`: see Region::run(). Thread-safe unless weights are quantized.
  void block(std::size_t expert, std::size_t index, at::Tensor& x, const at::Tensor& text, const at::Tensor& rows,
             const at::Tensor& rope, region::Mode mode, const WanBlockSlots& slots,
             const AdapterColumns::Layout* adapters, const parallel::Sequence* sequence) const;

  // A view of wan_rope_table()'s result as input of regions: [tokens, head_dim] fp32, cosine and sine of each pair.
  static at::Tensor rope_rows(const at::Tensor& rope);

 private:
  // Positions among the inputs.
  struct Linear {
    std::size_t bias, up = 0, adapter = 0;  // up: of B, or of weight and B
  };
  // A region and the weights of the blocks that run it.
  struct Table {
    std::unique_ptr<region::Region> region;
    BlockWeights weights;
    bool adapted = false;
    std::vector<std::size_t> given;  // positions among the inputs of what a call gives, in order
    std::vector<Linear> linears;
  };
  // Where a block is in the tables: without and with adapters.
  struct Row {
    const Table* table = nullptr;
    std::size_t row = 0;
  };
  using Block = std::array<Row, 2>;

  const Placement placement_;
  const std::shared_ptr<region::RegionHost> host_;
  std::vector<std::unique_ptr<Table>> tables_;
  std::vector<std::vector<Block>> experts_;
  std::vector<std::unique_ptr<AdapterColumns>> columns_;  // of each expert
};

}  // namespace ditfleet::pipeline
