// A loaded folder with adapters on it, for one request.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "pipeline/api/adapters.h"
#include "pipeline/families/flux/folder.h"
#include "pipeline/lora/adapter.h"

namespace ditfleet::pipeline {

// The folder's networks with low-rank terms on their linears. The weights are the folder's own; nothing of
// the folder is changed. Text encoders that have terms run eagerly, and the transformer where its weights have no room
// for adapters. Immutable once made.
struct AdaptedModels {
  FluxTransformer transformer;
  ClipEncoder clip;
  T5Encoder t5;
  std::string text_key;  // equal for two that encode text alike; "" as the folder alone does
  std::vector<std::shared_ptr<const Adapter>> held;  // what the terms point into
};

// Slots are numbered by their first linear's place among `linears`.
std::vector<BaseLinear> base_linears(const std::vector<NamedLinear>& linears);

// The folder's linears, as files of adapters name them.
LoraBase lora_base(const FluxFolder& folder);

// Null for a request without adapters, or with all of them at strength 0. Throws what AdapterStore::get throws.
std::shared_ptr<const AdaptedModels> adapt(const FluxFolder& folder, AdapterStore& adapters,
                                           const std::vector<LoraRequest>& requests);

}  // namespace ditfleet::pipeline
