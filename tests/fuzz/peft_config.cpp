// libFuzzer: any adapter_config.json, and any header of a safetensors file after a byte 0xFE. What is kept of the
// configuration is JSON with known keys, and the header with it describes the same tensors.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "shared/core/json.h"
#include "shared/safetensors/header.h"
#include "shared/safetensors/peft_folder.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ditfleet;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const auto split = std::min(input.find('\xFE'), input.size());
  const auto config = safetensors::peft_config(input.substr(0, split), "fuzz");
  if (!config) {
    if (config.error().message.find("fuzz") == std::string::npos) std::abort();
    return 0;
  }
  const auto kept = parse_json(*config);
  if (!kept || !kept->is_object() || kept->get_object().size() > 6) std::abort();

  const std::string_view text = input.substr(std::min(split + 1, input.size()));
  const std::uint64_t length = text.size();
  std::string head(sizeof length, '\0');
  std::memcpy(head.data(), &length, sizeof length);
  head += text;
  constexpr std::uint64_t kData = 1 << 16;
  const auto before = safetensors::parse_safetensors_header(head, head.size() + kData, "fuzz");
  const auto joined = safetensors::with_peft_config(head, *config, "fuzz");
  if (!joined) {
    if (before) std::abort();
    return 0;
  }
  const auto after = safetensors::parse_safetensors_header(*joined, joined->size() + kData, "fuzz");
  if (before.ok() != after.ok()) std::abort();
  if (!before) return 0;
  if (before->tensors.size() != after->tensors.size()) std::abort();
  const auto told = after->metadata.find(safetensors::kAdapterConfig);
  if (told == after->metadata.end() || told->second != *config) std::abort();
  return 0;
}
