// Recognizes adapters of fused matrices that consist of one adapter per linear.
#pragma once

#include <span>

#include "pipeline/lora/names.h"
#include "pipeline/weights/safetensors.h"

namespace ditfleet::pipeline {

// Floating-point zeros, including -0. `element`: the size of one.
bool all_zero(std::span<const std::byte> bytes, std::size_t element);

// Trainers that split a fused linear and save it fused stack the linears' A and put their B on the diagonal, all with
// the same rank. True if `up` [sum of the linears' rows, a multiple of the number of linears] is zero outside these
// blocks. False for no linears, and for element types that adapters do not use.
bool is_block_diagonal(const TensorView& up, std::span<const LoraPiece> linears);

}  // namespace ditfleet::pipeline
