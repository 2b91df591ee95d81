// A GPU program that copies many matrices in one launch, each with strides and a factor of its own: how adapters come
// into the columns beside a model's weights, which is some thousand copies.
#pragma once

#include <cstdint>

#include "pipeline/region/programs/fixed_program.h"

namespace ditfleet::region {

// What the kernels read, as they lie in the device's memory.
struct MatrixCopy {
  std::int64_t to = 0, from = 0;                // addresses; from 0: zeros
  std::int64_t rows = 0, columns = 0;           // fewer than 2^31 elements
  std::int64_t to_stride = 0, from_stride = 0;  // of rows, in elements
  double scale = 1;
};
static_assert(sizeof(MatrixCopy) == 7 * 8);

// Two kernels, copies_bf16 and copies_f32; the argument: the table's address, how many copies, blocks for each.
FixedProgram matrix_copies_program();

}  // namespace ditfleet::region
