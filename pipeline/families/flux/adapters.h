// Applies the adapters of one request to a loaded model.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "pipeline/api/adapters.h"
#include "pipeline/families/flux/folder.h"
#include "pipeline/lora/adapter.h"

namespace ditfleet::pipeline {

// Copies of the model's networks with low-rank terms on their linears. The copies share the model's weights and do not
// change them. A text encoder with terms runs eagerly. The transformer runs eagerly if the adapters' total rank exceeds
// the columns that are reserved for adapters. Immutable.
struct AdaptedModels {
  FluxTransformer transformer;
  ClipEncoder clip;
  T5Encoder t5;
  std::string text_key;  // equal for requests that encode text in the same way; "": as without adapters
  std::vector<std::shared_ptr<const Adapter>> held;  // the memory that the terms point into
};

// The model's linears and their names in adapter files.
LoraBase lora_base(const FluxFolder& folder);

// Null if the request has no adapters, or only adapters with strength 0. Throws what AdapterStore::get throws.
std::shared_ptr<const AdaptedModels> adapt(const FluxFolder& folder, AdapterStore& adapters,
                                           const std::vector<LoraRequest>& requests);

}  // namespace ditfleet::pipeline
