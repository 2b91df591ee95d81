// diffusers' first-block cache (hooks/first_block_cache.py): skips all blocks of a forward but the first one if the
// first block changes its input almost as it did in the last forward that ran all blocks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "pipeline/nn/run_state.h"
#include "pipeline/parallel/sequence.h"

namespace ditfleet::pipeline {

// The cache of one transformer, one prompt and one request. Call the functions on one thread, with tensors of one size
// [1, S, D] in the model's type: the tokens of the image or video. With `ranks`, each rank passes its own
// tokens, and all ranks decide alike. On tensors without memory nothing is skipped.
class BlockCache {
 public:
  // `threshold`: of mean |r − r'| ÷ mean |r'|, in the model's type. r is what the first block adds to its input, r'
  // what it added in the last forward that ran all blocks.
  explicit BlockCache(double threshold) : threshold_(threshold) {}

  // Call it after the first block, which made `after` of `before`. If the other blocks are to be skipped, it adds to
  // `after` what they added last, so that it stands for the last block's output. Otherwise keeps both tensors, so
  // nobody may write to them before finish(). Waits for the device. Throws what LibTorch and the group throw.
  bool skips(const at::Tensor& before, at::Tensor& after, const parallel::Sequence* ranks);
  // Call it with the last block's output after skips() returned false.
  void finish(const at::Tensor& last);
  bool skipped() const { return skipped_; }  // what skips() returned last
  // Between two forwards. With ranks, each has another state.
  void visit(RunState& state, const std::string& prefix);

 private:
  const double threshold_;
  bool skipped_ = false;
  at::Tensor first_, first_mean_;  // r' and mean |r'|
  at::Tensor output_;              // of the first block, until finish()
  at::Tensor others_;              // what the other blocks added; undefined before the first finish()
};

}  // namespace ditfleet::pipeline
