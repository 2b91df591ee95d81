// Splits the tensor names of adapter files into a module and the kind of tensor.
#pragma once

#include <string_view>

namespace ditfleet::pipeline {

enum class LoraKeyKind {
  kDown,     // A: [rank, in]
  kUp,       // B: [out, rank]
  kAlpha,    // a number
  kDora,     // DoRA's magnitudes
  kDiff,     // difference of a weight: [out, in]
  kBias,     // difference of a bias: [out]
  kUnknown,  // anything else
};

struct LoraKey {
  LoraKeyKind kind;
  std::string_view module;  // the name without the kind's suffix; the whole name for kUnknown
};

// Supports PEFT's .lora_A.weight and .lora_A.NAME.weight, kohya's .lora_down.weight, XLabs' .down.weight, diffusers'
// old .lora.down.weight and .lora_linear_layer.down.weight, the corresponding names of B, .alpha, .dora_scale,
// .lora_magnitude_vector, .diff, .diff_b, and .lora_B.bias or .lora_B.NAME.bias.
LoraKey parse_lora_key(std::string_view name);

}  // namespace ditfleet::pipeline
