// Quantizes the values of an attention to fp8 on a GPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>

namespace ditfleet::region {

struct RegionHost;

// Computes fp8_heads() of v [batch, tokens, heads, head size] on the calling thread's current stream: two launches if
// the program is available and v is bf16 with rows aligned to 16 bytes, else LibTorch's operators. A missing program
// counts as a fallback. Throws what LibTorch throws, and pipeline::Failure. Thread-safe.
using F8Heads = std::function<std::pair<at::Tensor, at::Tensor>(const at::Tensor& v)>;
F8Heads make_f8_heads(const RegionHost& host);

}  // namespace ditfleet::region
