// Products whose weight has columns that only some outputs read, without multiplying by the zeros of the others.
#pragma once

#include <cstdint>
#include <memory>

#include "pipeline/region/libraries/cublaslt.h"

namespace ditfleet::region {

struct RegionHost;

// out [rows, out] = x [rows, in] · weight [out, in]ᵀ. The last `apart` of the `in` columns are in `groups` equal runs,
// and the i-th run of outputs reads the i-th of them alone; the weight's other columns there are not read. Strides are
// of rows, in elements.
struct GroupedProduct {
  std::int64_t rows = 0, in = 0, out = 0;
  int groups = 1;
  std::int64_t apart = 0, x_stride = 0, weight_stride = 0, out_stride = 0;
};

class GroupedGemm {
 public:
  virtual ~GroupedGemm() = default;
  // Whether it takes less time than a library's product of all columns; with few rows it does not. Thread safe.
  virtual bool pays(const GroupedProduct& product) const = 0;
  // out = x · weightᵀ + bias in bf16, on the calling thread's current stream. The bits are those of the whole product
  // in the order of its columns. False, and nothing done, where the operands do not lie as the kernel wants them: runs
  // of 64 columns, rows 16 bytes aligned. Throws pipeline::Failure. Thread safe.
  virtual bool run(const GroupedProduct& product, const GemmOperands& operands) const = 0;
};

// Null where the host's GPU or driver has nothing for it (anything but Hopper), and, logged, where the kernel cannot be
// had: nothing but time is lost.
std::shared_ptr<const GroupedGemm> make_grouped_gemm(RegionHost& host);

}  // namespace ditfleet::region
