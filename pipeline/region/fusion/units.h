// The first half of fuse(): which ops go together, and in which order the groups run.
#pragma once

#include <vector>

#include "pipeline/region/fusion/plan.h"
#include "pipeline/region/fusion/row_kernel.h"

namespace ditfleet::region {

// One fused chain of row ops, or one attention, or one linear with the GELU that rides it.
struct Unit {
  std::vector<int> ops;     // of the program, in order
  RowKernel kernel;         // of a chain
  std::vector<int> reads;   // values the kernel loads, or the op's operands
  std::vector<int> writes;  // values others read
};

// Units that run as one launch; all but row kernels stand alone.
using Group = std::vector<Unit>;

// Groups in an order that computes. kInvalidArgument: an op that no generated kernel has.
Result<std::vector<Group>> group_ops(const Program& program, const FuseOptions& options);

// For each value the op that makes it, -1 for inputs.
std::vector<int> producers(const Program& program);

// What a value is made of, seen through views and joins: inputs and results of other ops.
void add_roots(const Program& program, const std::vector<int>& producer, int value, std::vector<int>& roots);

}  // namespace ditfleet::region
