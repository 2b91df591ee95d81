// Attention of a region, by the library that LibTorch has for the device.
#pragma once

#include <ATen/core/Tensor.h>

namespace ditfleet::region {

// q, k, v: [.., tokens, heads, head size] with rows that may be strided. softmax(q kᵀ / √head size) v for each head, as a new
// contiguous tensor of q's shape.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

// Runs a small attention and waits for it, so that the library (cuDNN: half a second) is loaded and the first real one
// builds but its plan. For a thread of its own, beside a compiler.
void open_attention(c10::Device device, c10::ScalarType type, std::int64_t heads, std::int64_t head_dim);

}  // namespace ditfleet::region
