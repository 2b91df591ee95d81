// Receipts: what made a result. The same receipt, but for its result, stands for the same bytes.
#pragma once

#include <string>

#include "pipeline/engine.h"

namespace ditfleet::worker {

struct ModelSet;
struct Unit;

// What all results of a loaded model have in common, as a JSON object: the model with a digest, the formats of its
// linears, the device, and `software`. The digest is the SHA-256 of the names, sizes and first and last MiB of its
// files, which tells models apart without reading all of their weights. Blocks.
std::string receipt_of_model(const ModelSet& set, const pipeline::ModelSource& source, const pipeline::ModelInfo& info,
                             const std::string& software);

struct Receipt {
  std::string json;  // with the id
  std::string id;    // the first 32 digits of the SHA-256 of the rest
};

// The receipt of a unit that was decoded: what its model has in common, the seed, the adapters, the plan, the GPUs and
// the SHA-256 of the spec.
Receipt receipt_of(const std::string& of_model, const Unit& unit);

// Microseconds of the unit's stages, times the GPUs that ran them.
std::int64_t gpu_us_of(const Unit& unit);

}  // namespace ditfleet::worker
