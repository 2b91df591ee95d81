// FLUX's blocks as compiled regions: two programs for all blocks, two more for blocks with adapters, and a pointer table
// for each block.
#pragma once

#include <memory>
#include <vector>

#include "pipeline/models/flux/adapter_columns.h"
#include "pipeline/models/flux/modulation.h"
#include "pipeline/region/run/region.h"

namespace ditfleet::pipeline {

class FluxRegions {
 public:
  // Keeps the slots' tensors. Compiles all programs (unless the host's options have dynamic off, where the first
  // call does); those with adapters where the slots have room for them. Throws what Region::prepare throws.
  FluxRegions(const FluxConfig& config, const FluxSlots& slots, Placement placement, std::shared_ptr<region::RegionHost> host);

  // What calls on so many tokens of the picture and frames are run with.
  region::Mode mode_for(std::int64_t tokens, std::int64_t frames) const { return region::mode_for(host_->options, tokens, frames); }

  // Double block `index`: image and text are replaced by its outputs, in their own memory where *_is_mine says that
  // nobody else reads it. rope: as rope_table() makes it. Thread safe.
  // `adapted`: with what load_adapters() put in place.
  void double_block(std::size_t index, at::Tensor& image, at::Tensor& text, bool text_is_mine, const DoubleModulation& modulation,
                    const at::Tensor& rope_rows, region::Mode mode, bool adapted) const;
  void single_block(std::size_t index, at::Tensor& tokens, const Modulation& modulation, const at::Tensor& rope_rows, region::Mode mode, bool adapted) const;

  // Whether the weights have room for adapters.
  bool takes_adapters() const { return adapters_ != nullptr; }
  // Puts the terms of these samples' linears where adapted blocks read them, unless they are there already: `key` says what they are.
  // On the current stream, while no adapted block runs. Throws what AdapterColumns::load throws.
  void load_adapters(const std::string& key, const std::vector<const FluxSlots*>& samples);
  // Equal where two adapted calls have the same shapes throughout.
  const std::vector<std::int64_t>& adapter_signature() const { return signature_; }

  // rope_table()'s table as regions take it: [tokens, head_dim] fp32, cosine and sine of each pair in turn; a view.
  static at::Tensor rope_rows(const at::Tensor& rope);

 private:
  // A region with the parameters of each block where the program wants them; the other inputs are undefined.
  struct Table {
    std::unique_ptr<region::Region> region;
    std::vector<std::vector<at::Tensor>> rows;
    std::vector<int> activations;  // positions in the order in which they are given
    // Of programs with adapters: where each linear's weight and A go, and which blocks have any.
    std::vector<std::pair<int, int>> linears;
    std::vector<bool> adapted;
  };
  template <class Block>
  void fill(Table& table, const std::vector<Block>& blocks, const std::vector<std::string>& call, bool adapted) const;
  void bind_adapters(Table& table, std::size_t& linear);
  const Table& table_for(const Table& plain, const Table& with_adapters, std::size_t index, bool adapted) const {
    return adapted && with_adapters.adapted[index] ? with_adapters : plain;
  }

  std::shared_ptr<region::RegionHost> host_;
  Table double_, single_;
  std::unique_ptr<AdapterColumns> adapters_;  // of all blocks' linears, in order; null: no room
  // What load_adapters() changes, one request at a time.
  Table adapted_double_, adapted_single_;
  std::string adapter_key_;
  std::vector<std::int64_t> signature_;
};

}  // namespace ditfleet::pipeline
