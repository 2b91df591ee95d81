// FLUX's blocks as compiled regions: two programs for all blocks, and two more for blocks with adapters.
#pragma once

#include <initializer_list>
#include <memory>
#include <vector>

#include "pipeline/families/flux/adapter_columns.h"
#include "pipeline/families/flux/modulation.h"
#include "pipeline/nn/block_weights.h"
#include "pipeline/region/run/region.h"

namespace ditfleet::pipeline {

// What the blocks of a request with adapters are called with.
struct FluxAdapters {
  AdapterColumns::Layout layout;
  std::vector<std::int64_t> signature;  // equal where two have the same shapes throughout
};

class FluxRegions {
 public:
  // Keeps the slots' tensors. Compiles all programs (unless the host's options have dynamic off, where the first
  // call does); those with adapters where the slots have room for them. Throws what Region::prepare throws.
  FluxRegions(const FluxConfig& config, const FluxSlots& slots, Placement placement,
              std::shared_ptr<region::RegionHost> host);

  // What calls on so many tokens of the picture and frames are run with.
  region::Mode mode_for(std::int64_t tokens, std::int64_t frames) const {
    return region::mode_for(host_->options, tokens, frames);
  }

  // A request of these sizes is to come: what the blocks' libraries lack for it is made meanwhile. Does not wait.
  // Thread safe.
  void prewarm(Placement placement, std::int64_t text_tokens, std::int64_t image_tokens) const;

  // Double block `index`: image and text are replaced by its outputs, in their own memory where *_is_mine says that
  // nobody else reads it. rope: as rope_table() makes it. Thread safe.
  // `adapters`: what load() was called with, or null.
  void double_block(std::size_t index, at::Tensor& image, at::Tensor& text, bool text_is_mine,
                    const DoubleModulation& modulation, const at::Tensor& rope_rows, region::Mode mode,
                    const FluxAdapters* adapters) const;
  void single_block(std::size_t index, at::Tensor& tokens, const Modulation& modulation, const at::Tensor& rope_rows,
                    region::Mode mode, const FluxAdapters* adapters) const;

  // Why blocks with the terms in these slots would run eagerly; empty if they need not. Thread safe.
  std::string adapter_problem(const FluxSlots& slots) const;
  // That they do. Throws what RegionHost::fall_back throws.
  void leave_adapters(const std::string& problem) const { host_->fall_back("flux", "adapters", problem); }
  // Of the terms in these slots, which must fit into the columns; null without columns. Thread safe.
  std::shared_ptr<const FluxAdapters> plan(const FluxSlots& slots) const;
  // Puts them where adapted blocks read them, unless they are there already: on the current stream and, for blocks
  // behind the first, beside it. While no adapted block runs.
  void load(const std::shared_ptr<const FluxAdapters>& adapters);
  // What comes on the current stream from here on finds them at all blocks. Blocks call it themselves, except in a
  // recording.
  void join_adapters() const {
    if (columns_) columns_->join();
  }
  // Overwrites what was loaded. The same holds.
  void clear_adapters();

  // rope_table()'s table as regions take it: [tokens, head_dim] fp32, cosine and sine of each pair in turn; a view.
  static at::Tensor rope_rows(const at::Tensor& rope);

 private:
  // A region and the blocks that run it.
  struct Table {
    std::unique_ptr<region::Region> region;
    BlockWeights weights;
    std::vector<int> activations;              // positions among the inputs, in the order in which they are given
    std::vector<std::pair<int, int>> linears;  // of programs with adapters: positions of each linear's weight and A
    std::size_t first_linear = 0;              // in AdapterColumns, of the first block
  };
  template <class Block>
  static void fill(Table& table, const std::vector<Block>& blocks, const std::vector<std::string>& call, bool adapted);
  void run(const Table& plain, const Table& adapted, std::size_t index, std::initializer_list<const at::Tensor*> given,
           std::vector<at::Tensor>& outputs, region::Mode mode, const FluxAdapters* adapters) const;

  std::shared_ptr<region::RegionHost> host_;
  Table double_, single_, adapted_double_, adapted_single_;
  std::unique_ptr<AdapterColumns> columns_;  // of all blocks' linears, in order; null: no room
  std::shared_ptr<const FluxAdapters> loaded_;
};

}  // namespace ditfleet::pipeline
