// An adapter's file, read and compared with the base model it is to change.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "pipeline/lora/names.h"
#include "pipeline/weights/safetensors.h"

namespace ditfleet::pipeline {

// output[piece] += scale · (x Aᵀ) Bᵀ
struct LoraTerm {
  const LoraTarget* target;  // of the LoraNames that were given
  TensorView down;           // A: [blocks · rank, target->in]
  TensorView up;             // B: [target->out, blocks · rank]
  std::int64_t rank;         // of one block
  double scale;
  // 1, or as many as target->linears: then B is zeros but for a block on the diagonal for each linear, which so has
  // `rank` rows of A of its own.
  std::int64_t blocks = 1;

  // What the rows of a block of B belong to, one after the other.
  std::span<const LoraPiece> pieces(std::int64_t block) const {
    return blocks == 1 ? std::span<const LoraPiece>(target->pieces)
                       : std::span<const LoraPiece>(target->linears).subspan(static_cast<std::size_t>(block), 1);
  }
};

struct LoraFile {
  SafetensorsFile file;         // what the views point into
  std::vector<LoraTerm> terms;  // sorted by the modules' names; at least one; no target twice
};

// Reads every format that LoraNames and parse_lora_key() know; ranks may differ from module to module. Alphas come
// from tensors or from the metadata (see LoraScaling). `names` must outlive the result. Reads all weights once.
// Errors name the file, param is "loras": kNotFound, kUnavailable; kDataCorrupt for a header that lies;
// kInvalidArgument for a pickle, DoRA, keys that are none of the above, modules or blocks that the base lacks, widths
// of another base, a rank above `max_rank` (of one linear, where a fused matrix is block-diagonal), a missing partner,
// a wrong shape or element type, and weights that are not finite.
Result<LoraFile> read_lora_file(const std::string& path, const LoraNames& names, std::int64_t max_rank);

}  // namespace ditfleet::pipeline
