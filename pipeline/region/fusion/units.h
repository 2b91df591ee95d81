// The first half of fuse(): groups ops into launches and orders them.
#pragma once

#include <vector>

#include "pipeline/region/fusion/plan.h"
#include "pipeline/region/fusion/row_kernel.h"

namespace ditfleet::region {

// A fused chain of row operators, an attention, or a linear with the GELU of its epilogue.
struct Unit {
  std::vector<int> ops;     // of the program, in order
  RowKernel kernel;         // chains only
  std::vector<int> reads;   // values the kernel loads, or the op's operands
  std::vector<int> writes;  // values that other units read
};

// Units that run as one launch. Only row kernels share one.
using Group = std::vector<Unit>;

// Groups in an executable order. kInvalidArgument: an op that generated kernels do not support.
Result<std::vector<Group>> group_ops(const Program& program, const FuseOptions& options);

// For each value the index of the op that makes it; -1: an input.
std::vector<int> producers(const Program& program);

// Adds the inputs and op results that a value consists of, looking through views and joins.
void add_roots(const Program& program, const std::vector<int>& producer, int value, std::vector<int>& roots);

}  // namespace ditfleet::region
