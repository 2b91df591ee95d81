// Applies the adapters of one request to a loaded model.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/engine/network.h"
#include "pipeline/lora/adapter.h"

namespace ditfleet::pipeline {

struct Adapted {
  // A copy with the adapters' terms on its linears. It shares the model's weights. Null: no adapter changes anything.
  // A text encoder with terms runs eagerly. A transformer runs eagerly if the adapters' combined rank exceeds the
  // columns beside its linears.
  std::unique_ptr<Network> network;
  std::string text_key;  // equal for requests that encode text in the same way; "": as without adapters
  std::vector<std::string> warnings;
  std::vector<std::shared_ptr<const Adapter>> held;  // the memory that the terms point into
};

// Throws what AdapterStore::get and add_adapter throw. An adapter with strength 0 must be usable, but adds nothing.
Adapted adapt(const Network& network, AdapterStore& adapters, const std::vector<LoraRequest>& requests);

// The model's linears and their names in adapter files.
LoraBase lora_base(const Network& network);

// The expert that an adapter is for, by the words of its name ("t2v_high_noise"). kBoth: the name does not say.
job::Expert expert_in_name(std::string_view name);

}  // namespace ditfleet::pipeline
