// What a program's symbols are in one call, read from the shapes of its inputs.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "pipeline/region/ir/program.h"

namespace ditfleet::region {

// Throws pipeline::Failure (kInvalidArgument) that names region, input and the shape that would be right: for another
// number of inputs, another rank, sizes that contradict each other, and, unless any_type, another element type.
// A table's axis may be 1 where its symbol is more: it broadcasts.
Sizes sizes_of(const Program& program, const std::vector<at::Tensor>& inputs, bool any_type = false);

}  // namespace ditfleet::region
