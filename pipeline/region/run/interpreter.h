// The backend `eager`: runs a program's operators one by one with LibTorch and rounds each result to the element
// type of the inputs, as diffusers does. It is the reference for compiled programs, and the fallback.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string_view>
#include <vector>

#include "pipeline/region/ir/program.h"

namespace ditfleet::pipeline::parallel {
class Sequence;
}

namespace ditfleet::region {

// `inputs`: one tensor for each of Program::inputs(), of the declared shapes, on one device. Computes in the tensors'
// element types, not the program's: fp32 or fp64 tensors give a reference for a bf16 program. The batch
// axis of a table input may have length 1. `sequence`: see Region::run(). `linear`: computes a linear by the name of
// its weight's input instead, whose tensors may be undefined then. Returns the outputs. Throws what LibTorch throws.
using LinearOperator = std::function<at::Tensor(std::string_view weight, const at::Tensor& x)>;
std::vector<at::Tensor> interpret(const Program& program, const std::vector<at::Tensor>& inputs,
                                  const pipeline::parallel::Sequence* sequence = nullptr,
                                  const LinearOperator& linear = nullptr);

}  // namespace ditfleet::region
