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

  // The pieces that the rows of a block of B belong to, in order.
  std::span<const LoraPiece> pieces(std::int64_t block) const {
    return blocks == 1 ? std::span<const LoraPiece>(target->pieces)
                       : std::span<const LoraPiece>(target->linears).subspan(static_cast<std::size_t>(block), 1);
  }
};

struct LoraFile {
  SafetensorsFile file;         // the terms' names and shapes are its
  std::vector<LoraTerm> terms;  // sorted by module name; at least one; no target twice
};

// Reads every format that LoraNames and parse_lora_key() support. Modules may have different ranks. Alphas come from
// tensors or from the metadata (see LoraScaling). `names` must outlive the result. Reads all weights once.
// Errors contain the file name and have the param "loras". kNotFound and kUnavailable: the file cannot be read.
// kDataCorrupt: an invalid header. kInvalidArgument: a pickle, DoRA, unknown keys, modules or blocks that the base does
// not have, widths of another base, a rank above `max_rank` (per linear if a fused matrix is block-diagonal), A without
// B or B without A, a wrong shape or element type, or weights that are not finite.
Result<LoraFile> read_lora_file(const std::string& path, const LoraNames& names, std::int64_t max_rank);

}  // namespace ditfleet::pipeline
