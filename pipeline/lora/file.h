// Reads an adapter file and checks it against the base model.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "pipeline/lora/names.h"
#include "pipeline/weights/safetensors.h"

namespace ditfleet::pipeline {

// output[piece] += scale · x Δᵀ, where Δ [target->out, target->in] has this rank.
struct LoraTerm {
  enum class Form {
    kPair,        // up · down: B [target->out, blocks · rank] and A [blocks · rank, target->in]
    kDifference,  // down [target->out, target->in]
    kHadamard,    // (up · down) ∘ (up2 · down2), LoHa
    kKronecker,   // (up · down) ⊗ (up2 · down2), LoKr; without down the first factor is `up`, likewise the second
  };
  const LoraTarget* target;  // owned by the LoraNames
  TensorView down, up;
  std::int64_t rank;  // per block
  double scale;
  // 1, or the number of target->linears. In the second case B is block-diagonal with one block per linear, and each
  // linear has its own `rank` rows of A.
  std::int64_t blocks = 1;
  Form form = Form::kPair;
  TensorView down2 = {}, up2 = {};

  // The pieces that the rows of a block of B belong to, in order.
  std::span<const LoraPiece> pieces(std::int64_t block) const {
    return blocks == 1 ? std::span<const LoraPiece>(target->pieces)
                       : std::span<const LoraPiece>(target->linears).subspan(static_cast<std::size_t>(block), 1);
  }
};

// bias[pieces] += scale · values
struct LoraBias {
  const LoraTarget* target;  // owned by the LoraNames
  TensorView values;         // [target->out]
  double scale;
};

struct LoraFile {
  SafetensorsFile file;             // the terms' names and shapes are its
  std::vector<LoraTerm> terms;      // sorted by module name; no target twice
  std::vector<LoraBias> biases;     // as the terms; together at least one
  std::vector<std::string> unused;  // tensors that are left out, sorted; those without effect, all zero, not listed
};

// Reads every format that LoraNames and parse_adapter_key() support. Modules may have different ranks. Alphas come from
// tensors or from the metadata (see LoraScaling); they apply to .lora_B.bias, but not to .diff and .diff_b. What the
// base does not have is left out, as PEFT and ComfyUI do, unless nothing of the transformer is left. `names` must
// outlive the result. Reads all weights once. Errors contain the file name and have the param "loras". kNotFound and
// kUnavailable: the file cannot be read. kDataCorrupt: an invalid header. kInvalidArgument: a pickle, a kind that
// cannot be applied, such as DoRA, nothing for this base, widths of another base, a rank above `max_rank` (per linear
// if a fused matrix is block-diagonal), A without B or B without A, a wrong shape or element type, or weights that are
// not finite.
Result<LoraFile> read_lora_file(const std::string& path, const LoraNames& names, std::int64_t max_rank);

// "a, b and 3 more": the first names, shortened and escaped.
std::string list_text(const std::vector<std::string>& names);

}  // namespace ditfleet::pipeline
