// The folders in which PEFT saves adapters: adapter_config.json and adapter_model.safetensors.
#pragma once

#include <cstdint>
#include <string>

#include "shared/core/result.h"

namespace ditfleet::safetensors {

// An adapter's folder as one safetensors file, with the configuration in its metadata, where diffusers saves it.
struct PeftFolder {
  std::string file;          // adapter_model.safetensors
  std::string config;        // for the metadata key kAdapterConfig: JSON
  std::string head;          // the header of the one file, with the configuration
  std::uint64_t begins = 0;  // of the tensors in `file`: the one file is `head` and what follows from here
};

inline constexpr const char* kAdapterConfig = "lora_adapter_metadata";

// Reads the configuration and the header. kNotFound: a file is missing. kInvalidArgument: one is not what it should be,
// or the adapter is of another kind than LoRA. The message contains the file and the problem.
Result<PeftFolder> open_peft_folder(const std::string& folder);

}  // namespace ditfleet::safetensors
