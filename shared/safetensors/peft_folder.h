// The folders in which PEFT saves adapters: adapter_config.json and adapter_model.safetensors.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "shared/core/result.h"

namespace ditfleet::safetensors {

// An adapter's folder as one safetensors file, with the configuration in its metadata, where diffusers saves it.
struct PeftFolder {
  std::string file;          // adapter_model.safetensors
  std::string config;        // for the metadata key kAdapterConfig: JSON
  std::string head;          // the header of the one file, with the configuration
  std::uint64_t begins = 0;  // of the tensors in `file`: the one file is `head` and what follows from here

  // Of the one file, if `file` has so many.
  std::int64_t bytes(std::int64_t file_bytes) const {
    return file_bytes - static_cast<std::int64_t>(begins) + static_cast<std::int64_t>(head.size());
  }
};

inline constexpr std::array<const char*, 2> kPeftFiles = {"adapter_config.json", "adapter_model.safetensors"};
inline constexpr const char* kAdapterConfig = "lora_adapter_metadata";

// Reads the configuration and the header. kNotFound: a file is missing. kInvalidArgument: one is not what it should be,
// or the adapter is of another kind than LoRA. The message contains the file and the problem.
Result<PeftFolder> open_peft_folder(const std::string& folder);
// The same for a folder. Another path is the one file itself, which is not read.
Result<PeftFolder> open_adapter(const std::string& path);

inline constexpr std::size_t kMaxPeftConfigBytes = 1 << 20;
// What is kept of the text of adapter_config.json. kInvalidArgument; the message begins with `what`.
Result<std::string> peft_config(std::string_view text, const std::string& what);
// The header of a safetensors file, from its first byte to its end, with peft_config(). kInvalidArgument, as above.
Result<std::string> with_peft_config(std::string_view head, const std::string& config, const std::string& what);

}  // namespace ditfleet::safetensors
