// A product for NVIDIA's Hopper (sm_90a) whose weight has columns that only some outputs read: B of adapters of q, k
// and v lie side by side, and two thirds of them are zeros. A library multiplies by these zeros; this kernel leaves
// them out.
#pragma once

#include <array>
#include <cstdint>

#include "pipeline/region/programs/fixed_program.h"

namespace ditfleet::region {

// What the kernel takes, in this order and as 64-bit words. A map is a CUtensorMap of bf16, as cuTensorMapEncodeTiled
// makes it.
struct GroupedGemmArgument {
  std::array<long long, 16> x, weight,
      out;             // maps: boxes of kTile x kStep, kTile / 2 x kStep and 64 x 32; swizzles of 128, 128 and 64 bytes
  long long bias = 0;  // address, 4-byte aligned; 0: none
  long long rows = 0, columns = 0;  // of out
  long long steps = 0;              // kStep columns of x and the weight each, that all outputs read
  long long groups = 1,
            own_steps =
                0;  // behind them so many for the first of `groups` equal runs of outputs, then as many for the next …
  long long unused[2] = {};
};
static_assert(sizeof(GroupedGemmArgument) == 56 * 8);

inline constexpr const char* kGroupedGemmArch = "sm_90a";
inline constexpr int kGroupedGemmTile = 192;  // outputs of a block: so many rows and columns
inline constexpr int kGroupedGemmStep = 64;   // columns of x and the weight at a time
inline constexpr int kGroupedGemmPair =
    2;  // blocks of a cluster, whose tiles lie one above the other and share what is read of the weight

// One kernel, grouped_gemm; as many blocks as multiprocessors, less one if that is odd.
FixedProgram grouped_gemm_program();

}  // namespace ditfleet::region
