// Reads an adapter file and checks it against the base model.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "pipeline/lora/names.h"
#include "pipeline/weights/safetensors.h"

namespace ditfleet::pipeline {

// output[piece] += scale · (x Aᵀ) Bᵀ
struct LoraTerm {
  const LoraTarget* target;  // owned by the LoraNames
  TensorView down;           // A: [blocks · rank, target->in]
  TensorView up;             // B: [target->out, blocks · rank]
  std::int64_t rank;         // per block
  double scale;
  // 1, or the number of target->linears. In the second case B is block-diagonal with one block per linear, and each
  // linear has its own `rank` rows of A.
  std::int64_t blocks = 1;
  bool identity = false;  // B is the identity and `up` is empty: A is the difference of a whole weight

  // The pieces that the rows of a block of B belong to, in order.
  std::span<const LoraPiece> pieces(std::int64_t block) const {
    return blocks == 1 ? std::span<const LoraPiece>(target->pieces)
                       : std::span<const LoraPiece>(target->linears).subspan(static_cast<std::size_t>(block), 1);
  }
};

// bias[pieces] += values
struct LoraBias {
  const LoraTarget* target;  // owned by the LoraNames
  TensorView values;         // [target->out]
};

struct LoraFile {
  SafetensorsFile file;             // the terms' names and shapes are its
  std::vector<LoraTerm> terms;      // sorted by module name; no target twice
  std::vector<LoraBias> biases;     // as the terms; together at least one
  std::vector<std::string> unused;  // tensors that are left out, sorted
};

// Reads every format that LoraNames and parse_lora_key() support. Modules may have different ranks. Alphas come from
// tensors or from the metadata (see LoraScaling). `names` must outlive the result. Reads all weights once.
// With LoraBase::differences, .diff, .diff_b and .lora_B.bias are differences of weights and biases, to which alphas do
// not apply.
// Errors contain the file name and have the param "loras". kNotFound and kUnavailable: the file cannot be read.
// kDataCorrupt: an invalid header. kInvalidArgument: a pickle, DoRA, unknown keys, modules or blocks that the base does
// not have, widths of another base, a rank above `max_rank` (per linear if a fused matrix is block-diagonal), A without
// B or B without A, a wrong shape or element type, or weights that are not finite.
Result<LoraFile> read_lora_file(const std::string& path, const LoraNames& names, std::int64_t max_rank);

// "a, b and 3 more": the first names, shortened and escaped.
std::string list_text(const std::vector<std::string>& names);

}  // namespace ditfleet::pipeline
