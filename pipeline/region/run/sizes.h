// Reads the values of a program's symbols from the shapes of a call's inputs.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "pipeline/region/ir/program.h"

namespace ditfleet::region {

constexpr c10::ScalarType scalar_type(ElementType type) {
  return type == ElementType::kF32    ? c10::ScalarType::Float
         : type == ElementType::kBF16 ? c10::ScalarType::BFloat16
                                      : c10::ScalarType::Float8_e4m3fn;
}

// Throws pipeline::Failure (kInvalidArgument) for a wrong number of inputs, a wrong rank, contradicting sizes and,
// unless any_type, a wrong element type. The message names region, input and the right shape. A table's axis of length
// 1 broadcasts.
Sizes sizes_of(const Program& program, const std::vector<at::Tensor>& inputs, bool any_type = false);

}  // namespace ditfleet::region
