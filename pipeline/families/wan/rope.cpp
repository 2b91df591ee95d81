#include "pipeline/families/wan/rope.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "pipeline/device/failure.h"

namespace ditfleet::pipeline {

at::Tensor wan_rope_table(const WanConfig& config, std::int64_t frames, std::int64_t rows, std::int64_t columns,
                          c10::Device device) {
  using c10::ScalarType;
  const std::array<std::int64_t, 3> size{frames, rows, columns};
  if (const std::int64_t most = *std::max_element(size.begin(), size.end()); most > config.rope_max_seq_len)
    fail(Code::kInvalidArgument, "the video has " + std::to_string(most) +
                                     " tokens along an axis; this model accepts at most " +
                                     std::to_string(config.rope_max_seq_len));
  if (device.is_meta())
    return at::empty({1, frames * rows * columns, 1, config.head_dim / 2},
                     at::TensorOptions(ScalarType::ComplexFloat).device(device));
  std::vector<at::Tensor> axes;
  for (std::size_t axis = 0; axis < 3; ++axis) {
    const std::int64_t dim = config.rope_axes()[axis];
    std::vector<std::int64_t> shape{1, 1, 1, dim / 2};
    shape[axis] = size[axis];
    axes.push_back(rope_axis(at::arange(size[axis]), dim).view(shape).expand({frames, rows, columns, dim / 2}));
  }
  return at::cat(axes, 3).view({1, frames * rows * columns, 1, config.head_dim / 2}).to(device);
}

}  // namespace ditfleet::pipeline
