// Whether a fused matrix's B holds an adapter of each linear's own.
#pragma once

#include <span>

#include "pipeline/lora/names.h"
#include "pipeline/weights/safetensors.h"

namespace ditfleet::pipeline {

// Trainers that split a fused linear and write it fused again stack the linears' A and put their B on the diagonal, all
// with the same rank. True if `up`, of [sum of the linears' rows, a multiple of as many as there are linears], is zeros
// beside these blocks. False for no linears, and for element types that adapters do not come in.
bool is_block_diagonal(const TensorView& up, std::span<const LoraPiece> linears);

}  // namespace ditfleet::pipeline
