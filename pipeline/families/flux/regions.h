// FLUX's blocks as compiled regions: for double and single blocks, each with and without adapters. Blocks whose linears
// are stored in different ways have regions of their own.
#pragma once

#include <initializer_list>
#include <memory>
#include <vector>

#include "pipeline/families/flux/modulation.h"
#include "pipeline/nn/adapter_columns.h"
#include "pipeline/nn/block_weights.h"
#include "pipeline/region/run/region.h"

namespace ditfleet::pipeline {

// The adapters of a request as arguments of the blocks.
struct FluxAdapters {
  std::shared_ptr<const AdapterColumns::Layout> layout;
  std::vector<std::int64_t> signature;  // equal for requests whose operands have equal sizes
};

class FluxRegions {
 public:
  FluxRegions(const FluxRegions&) = delete;
  FluxRegions& operator=(const FluxRegions&) = delete;
  // Keeps the tensors of `slots`. Compiles all programs; with dynamic off the first call compiles instead. Compiles the
  // programs with adapters only if columns are reserved. `blocks`: their weights, if these can leave the device. Throws
  // what Region::prepare throws.
  FluxRegions(const FluxConfig& config, const FluxSlots& slots, Placement placement,
              std::shared_ptr<region::RegionHost> host, std::shared_ptr<PartSequence> blocks = nullptr);

  // The programs that a constructor with room for adapters compiles. Of `slots` only the linears' formats are read.
  static std::vector<region::Program> programs(const FluxConfig& config, const FluxSlots& slots, Placement placement);

  // The mode of calls with this number of image tokens and frames.
  region::Mode mode_for(std::int64_t tokens, std::int64_t frames) const {
    return region::mode_for(host_->options, tokens, frames);
  }

  // Prewarms library plans for these sizes in the background. Does not block. Thread-safe.
  void prewarm(Placement placement, std::int64_t text_tokens, std::int64_t image_tokens) const;

  // Replaces image and text by the outputs of double block `index`. *_is_mine: no other code reads that tensor's
  // memory, so the output may overwrite it. `rope_rows`: see rope_rows(). `adapters`: the argument of load(), or null.
  // `sequence`: how ranks share the tokens of both streams; see Region::run(). Thread-safe unless weights are
  // quantized.
  void double_block(std::size_t index, at::Tensor& image, at::Tensor& text, bool text_is_mine,
                    const DoubleModulation& modulation, const at::Tensor& rope_rows, region::Mode mode,
                    const FluxAdapters* adapters, const parallel::Sequence* sequence) const;
  void single_block(std::size_t index, at::Tensor& tokens, const Modulation& modulation, const at::Tensor& rope_rows,
                    region::Mode mode, const FluxAdapters* adapters, const parallel::Sequence* sequence) const;

  // Why blocks with the terms in `slots` must run eagerly; empty if they can run compiled. Thread-safe.
  std::string adapter_problem(const FluxSlots& slots) const;
  // Counts the fallback to eager blocks. Throws what RegionHost::fall_back throws.
  void leave_adapters(const std::string& problem) const { host_->fall_back("flux", "adapters", problem); }
  // Prepares the terms in `slots`, which must fit into the columns. Null if there are no columns. Thread-safe.
  std::shared_ptr<const FluxAdapters> plan(const FluxSlots& slots) const;
  // See AdapterColumns::load().
  void load(const FluxAdapters& adapters) { columns_->load(adapters.layout); }
  // Makes the current stream wait for the side stream. Blocks call it themselves, except while a graph is recorded.
  void join_adapters() const {
    if (columns_) columns_->join();
  }
  void clear_adapters() {
    if (columns_) columns_->clear();
  }

  // A view of rope_table()'s result as input of regions: [tokens, head_dim] fp32, cosine and sine of each pair.
  static at::Tensor rope_rows(const at::Tensor& rope);

 private:
  // A region and the weights of the blocks that run it.
  struct Table {
    std::unique_ptr<region::Region> region;
    BlockWeights weights;
    std::vector<int> activations;              // positions among the inputs, in the order in which they are given
    std::vector<std::pair<int, int>> linears;  // of programs with adapters: positions of B (or weight and B) and of A
  };
  // Where a block is in the tables.
  struct Block {
    const Table *plain = nullptr, *adapted = nullptr;
    std::size_t row = 0, adapted_row = 0;
    std::size_t first_linear = 0;  // in AdapterColumns
  };
  template <class BlockSlots, class Make>
  void add_blocks(const std::vector<BlockSlots>& blocks, const FluxConfig& config, Placement placement, Make make,
                  const std::vector<std::string>& call, bool adapted, std::vector<Block>& made);
  void run(const Block& block, std::initializer_list<const at::Tensor*> given, std::vector<at::Tensor>& outputs,
           region::Mode mode, const FluxAdapters* adapters, const parallel::Sequence* sequence) const;

  std::shared_ptr<region::RegionHost> host_;
  std::shared_ptr<WeightMemory> memory_ = std::make_shared<WeightMemory>();
  std::vector<std::unique_ptr<Table>> tables_;
  std::vector<Block> double_, single_;
  std::unique_ptr<AdapterColumns> columns_;  // of all blocks' linears, in order; null: no columns
};

}  // namespace ditfleet::pipeline
