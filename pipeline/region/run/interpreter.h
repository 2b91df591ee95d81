// The backend eager: a program op by op with LibTorch, each result rounded to its type as in diffusers. The reference
// for compiled programs, and what runs where none can be had.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "pipeline/region/ir/program.h"

namespace ditfleet::region {

// `inputs`: one tensor for each of Program::inputs(), of the declared shapes, on one device. Element types are the
// tensors' own, not the program's: fp32 or fp64 tensors give a reference for a bf16 program. A table's axis of length
// batch may be 1. Returns the outputs. Throws what LibTorch throws.
std::vector<at::Tensor> interpret(const Program& program, const std::vector<at::Tensor>& inputs);

}  // namespace ditfleet::region
