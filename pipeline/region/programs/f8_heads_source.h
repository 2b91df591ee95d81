// A GPU program that quantizes the values of an attention to fp8.
#pragma once

#include "pipeline/region/programs/fixed_program.h"

namespace ditfleet::region {

// The kernels, in this order: f8_heads_largest, f8_heads_codes. Argument: the addresses of v (bf16), the codes, the
// largest bits and the scales; tokens, heads and head size (a multiple of 8) of v; its strides of samples, tokens and
// heads; the blocks of each head. Needs sm_89. The first kernel raises each head's unsigned integer, which must be 0
// before, to the largest |v| as the bits of a float. The second one writes codes and scales. Both run blocks · heads ·
// samples blocks.
FixedProgram f8_heads_program();

}  // namespace ditfleet::region
