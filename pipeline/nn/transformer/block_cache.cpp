#include "pipeline/nn/transformer/block_cache.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/mean.h>

namespace ditfleet::pipeline {
namespace {

at::Tensor abs_mean(const at::Tensor& x, const parallel::Sequence* ranks) {
  if (!ranks) return at::mean(at::abs(x));
  const at::Tensor by_token = at::mean(at::abs(x), {2}, /*keepdim=*/true, c10::ScalarType::Float);
  return at::mean(ranks->gather(by_token)).to(x.scalar_type());
}

}  // namespace

bool BlockCache::skips(const at::Tensor& before, at::Tensor& after, const parallel::Sequence* ranks) {
  const at::Tensor added = after - before;
  if (others_.defined()) {
    const at::Tensor change = abs_mean(added - first_, ranks) / first_mean_;
    // The device has nothing else to do, so the wait costs the launch of the next kernel only. NaN skips, as in
    // diffusers.
    skipped_ = !change.is_meta() && !(change.item<double>() > threshold_);
    if (skipped_) {
      after = others_ + after;
      return true;
    }
  }
  first_ = added;
  first_mean_ = abs_mean(added, ranks);
  output_ = after;
  return false;
}

void BlockCache::visit(RunState& state, const std::string& prefix) {
  state.tensor(prefix + ".first", first_);
  state.tensor(prefix + ".first_mean", first_mean_);
  state.tensor(prefix + ".others", others_);
}

void BlockCache::finish(const at::Tensor& last) {
  others_ = last - output_;
  output_.reset();
}

}  // namespace ditfleet::pipeline
