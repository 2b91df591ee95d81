// FLUX's blocks as compiled regions: two programs for all blocks, and a pointer table for each block.
#pragma once

#include <memory>
#include <vector>

#include "pipeline/models/flux/modulation.h"
#include "pipeline/region/run/region.h"

namespace ditfleet::pipeline {

class FluxRegions {
 public:
  // Keeps the slots' tensors. Compiles both programs (unless the host's options have dynamic off, where the first
  // call does). Throws what Region::prepare throws.
  FluxRegions(const FluxConfig& config, const FluxSlots& slots, Placement placement, std::shared_ptr<region::RegionHost> host);

  // What calls on so many tokens of the picture and frames are run with.
  region::Mode mode_for(std::int64_t tokens, std::int64_t frames) const { return region::mode_for(host_->options, tokens, frames); }

  // Double block `index`: image and text are replaced by its outputs, in their own memory where *_is_mine says that
  // nobody else reads it. rope: as rope_table() makes it. Thread safe.
  void double_block(std::size_t index, at::Tensor& image, at::Tensor& text, bool text_is_mine, const DoubleModulation& modulation,
                    const at::Tensor& rope_rows, region::Mode mode) const;
  void single_block(std::size_t index, at::Tensor& tokens, const Modulation& modulation, const at::Tensor& rope_rows, region::Mode mode) const;

  // rope_table()'s table as regions take it: [tokens, head_dim] fp32, cosine and sine of each pair in turn; a view.
  static at::Tensor rope_rows(const at::Tensor& rope);

 private:
  // A region with the parameters of each block where the program wants them; the other inputs are undefined.
  struct Table {
    std::unique_ptr<region::Region> region;
    std::vector<std::vector<at::Tensor>> rows;
    std::vector<int> activations;  // positions in the order in which they are given
  };
  std::shared_ptr<region::RegionHost> host_;
  Table double_, single_;
};

}  // namespace ditfleet::pipeline
