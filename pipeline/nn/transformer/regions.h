// The repeated blocks of a transformer as compiled regions, each with and without adapters. Blocks whose programs are
// equal share a region, also across experts. Blocks whose linears are stored in different ways do not.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/nn/adapter_columns.h"
#include "pipeline/nn/block_weights.h"
#include "pipeline/nn/transformer/weights.h"
#include "pipeline/region/run/region.h"

namespace ditfleet::pipeline {

class BlockRegions {
 public:
  // One of the transformers of a model.
  struct Expert {
    const TransformerSpec* spec;
    const TransformerWeights* weights;
    std::shared_ptr<PartSequence> parts;  // TransformerParts::blocks
  };
  BlockRegions(const BlockRegions&) = delete;
  BlockRegions& operator=(const BlockRegions&) = delete;
  // Keeps the weights' tensors. Compiles all programs, unless dynamic is off: then the first call compiles. Compiles
  // programs with adapters only if columns are reserved. Throws what Region::prepare throws.
  BlockRegions(const std::vector<Expert>& experts, Placement placement, std::shared_ptr<region::RegionHost> host);

  // The programs that a constructor with columns compiles. Of `weights` only the linears' formats are read.
  static std::vector<region::Program> programs(const TransformerSpec& spec, const TransformerWeights& weights,
                                               Placement placement);

  const region::RegionHost& host() const { return *host_; }
  // Prewarms library plans in the background. `sizes`: of a call, without the ranks of adapters; one for each
  // TransformerSpec::blocks. `adapters`: also for blocks with adapters. `variant`: of their programs. Does not block.
  // Thread-safe.
  void prewarm(std::span<const region::Sizes> sizes, bool adapters, std::size_t variant = 0) const;

  // The columns of the expert's blocks; null if none are reserved.
  AdapterColumns* columns(std::size_t expert) const { return columns_[expert].get(); }
  static AdapterColumns::Terms terms_of(const TransformerSpec& spec, const TransformerWeights& weights);

  // Runs a block of an expert. `given`: in the order of BlockSpec::given. `outputs`: see Region::run(). `block`: the
  // expert's, perhaps with changes of biases. `adapters`: what columns() have loaded, or null. `sequence`: how ranks
  // share the tokens; see Region::run(). `variant`: of the block's programs. Thread-safe unless weights are quantized.
  void run(std::size_t expert, std::size_t index, const TransformerBlock& block,
           std::initializer_list<const at::Tensor*> given, std::vector<at::Tensor>& outputs,
           const AdapterColumns::Layout* adapters, const parallel::Sequence* sequence, std::size_t variant = 0) const;

 private:
  // The positions of the inputs that change with the request.
  struct Linear {
    std::size_t index;                      // in TransformerBlock::linears
    std::size_t bias, up = 0, adapter = 0;  // up: of B, or of weight and B
  };
  // A region and the weights of the blocks that run it.
  struct Table {
    std::unique_ptr<region::Region> region;
    BlockWeights weights;
    std::size_t spec, variant;
    bool adapted;
    std::vector<std::size_t> given;  // positions among the inputs
    std::vector<Linear> linears;
    region::Sizes ranks = {};  // of adapters at each linear, all 0
  };
  // Where a block is in the tables.
  struct Row {
    const Table* table = nullptr;
    std::size_t row = 0;
  };
  struct Block {
    std::vector<std::array<Row, 2>> rows;  // of each variant, without and with adapters
    std::size_t first_linear = 0;          // in AdapterColumns
  };

  const Placement placement_;
  const std::shared_ptr<region::RegionHost> host_;
  std::vector<std::unique_ptr<Table>> tables_;
  std::vector<std::vector<Block>> blocks_;                // of each expert
  std::vector<std::unique_ptr<AdapterColumns>> columns_;  // of each expert
};

}  // namespace ditfleet::pipeline
