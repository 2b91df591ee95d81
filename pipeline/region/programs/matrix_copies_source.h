// A GPU program that copies many matrices in one launch, each with its own strides and factor. Loading an adapter into
// the columns next to a model's weights takes several thousand copies.
#pragma once

#include <cstdint>

#include "pipeline/region/programs/fixed_program.h"

namespace ditfleet::region {

// The table's entries in device memory.
struct MatrixCopy {
  std::int64_t to = 0, from = 0;                // addresses; from 0: zeros
  std::int64_t rows = 0, columns = 0;           // fewer than 2^31 elements
  std::int64_t to_stride = 0, from_stride = 0;  // of rows, in elements
  double scale = 1;
};
static_assert(sizeof(MatrixCopy) == 7 * 8);

// Two kernels, copies_bf16 and copies_f32. Argument: the table's address, number of copies, blocks per copy.
FixedProgram matrix_copies_program();

}  // namespace ditfleet::region
