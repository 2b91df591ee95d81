// Quantizes the values of an attention to fp8 on a GPU.
#pragma once

#include "pipeline/region/libraries/fp8.h"

namespace ditfleet::region {

struct RegionHost;

// Returns what computes fp8_heads() of v [batch, tokens, heads, head size] on the calling thread's current stream: two
// launches if the program is available and v is bf16 with rows aligned to 16 bytes, else LibTorch's operators. A
// missing program counts as a fallback. Throws what LibTorch throws, and pipeline::Failure. Thread-safe.
F8Heads make_f8_heads(const RegionHost& host);

}  // namespace ditfleet::region
