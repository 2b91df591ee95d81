// Applies the adapters of one request to the transformers of a loaded model.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/api/adapters.h"
#include "pipeline/families/wan/folder.h"
#include "pipeline/lora/adapter.h"

namespace ditfleet::pipeline {

// Copies of the transformers with the adapters' terms on their linears. They share the model's weights. Immutable.
struct WanAdapters {
  std::array<std::optional<WanTransformer>, 2> transformers;  // by expert; none: the model's own
  std::vector<std::string> warnings;
  std::vector<std::shared_ptr<const Adapter>> held;  // the memory that the terms point into
};

// The linears of a transformer and their names in adapter files. The same for both transformers of a folder.
LoraBase lora_base(const WanFolder& folder);

// Throws what AdapterStore::get and add_adapter throw. An adapter with strength 0 must be usable, but adds nothing.
WanAdapters adapt(const WanFolder& folder, AdapterStore& adapters, const std::vector<LoraRequest>& requests);

// The expert that a name such as "wan2.2_t2v_high_noise" is for, by its words. kBoth: it does not say.
job::Expert expert_in_name(std::string_view name);

}  // namespace ditfleet::pipeline
