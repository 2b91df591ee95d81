// Splits the tensor names of adapter files into a module and the kind of tensor.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ditfleet::safetensors {

enum class AdapterKind {
  kDown,       // A: [rank, in]
  kUp,         // B: [out, rank]
  kAlpha,      // a number
  kDiff,       // difference of a weight: [out, in]
  kDiffBias,   // difference of a bias: [out]
  kBias,       // bias of B: [out]
  kHadamard,   // a matrix of LoHa: (w1_a · w1_b) ∘ (w2_a · w2_b)
  kKronecker,  // a matrix of LoKr: w1 ⊗ w2, each perhaps a product _a · _b
  kRefused,    // of a kind that cannot be applied: AdapterKey::part says which
  kUnknown,    // anything else
};

struct AdapterKey {
  AdapterKind kind;
  std::string_view module;  // the name without the kind's suffix; the whole name for kUnknown
  std::string_view part;    // kHadamard: "w1_a"; kKronecker: "w2"; kRefused: "DoRA"
};

// Supports PEFT's .lora_A.weight and .lora_A.NAME.weight, kohya's .lora_down.weight, XLabs' .down.weight, diffusers'
// old .lora.down.weight and .lora_linear_layer.down.weight, the corresponding names of B, .alpha, .diff, .diff_b, other
// names that begin with .diff_ (kUnknown), .lora_B.bias or .lora_B.NAME.bias, and LyCORIS' .hada_… and .lokr_….
AdapterKey parse_adapter_key(std::string_view name);

// Whether one of the names has one of these parts, with "_" for ".".
bool have_part(const std::vector<std::string>& names, std::span<const std::string_view> parts);

// The models that tensors of these names are for, such as "Stable Diffusion XL", if that can be told and they are not
// of a family that DiTFleet has; else empty.
std::string_view other_model_of(const std::vector<std::string>& names);

}  // namespace ditfleet::safetensors
