// Products whose weight has columns that only some outputs read, without multiplying by the zeros of the others.
#pragma once

#include <cstdint>
#include <memory>

#include "pipeline/region/gpu/cublaslt.h"

namespace ditfleet::region {

struct RegionHost;

class GroupedGemm {
 public:
  virtual ~GroupedGemm() = default;
  // out = x · weightᵀ + bias in bf16, where the last `apart` of the `in` columns are in `groups` equal runs and the i-th run of outputs reads the
  // i-th run alone; the weight's other columns there are not read. Strides in elements. On the calling thread's current stream. The bits are those of
  // the whole product in the order of its columns. False, and nothing done, where a library's product of all columns
  // would be as fast (few rows) or the operands do not lie as the kernel wants them: runs of 64 columns, rows 16 bytes aligned. Throws pipeline::Failure. Thread safe.
  virtual bool run(std::int64_t rows, std::int64_t in, std::int64_t out, int groups, std::int64_t apart, std::int64_t x_stride, std::int64_t weight_stride,
                   std::int64_t out_stride, const GemmOperands& operands) const = 0;
};

// Null where the host's GPU or driver has nothing for it (anything but Hopper).
std::shared_ptr<const GroupedGemm> make_grouped_gemm(RegionHost& host);

}  // namespace ditfleet::region
