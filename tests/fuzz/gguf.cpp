// libFuzzer: any bytes as a GGUF file. The parser must refuse, or describe only what the bytes hold; the values of
// small tensors must be readable.
#include "pipeline/weights/gguf.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ditfleet::pipeline;
  const std::string file(reinterpret_cast<const char*>(data), size);
  const auto header = parse_gguf_header(file, size, "fuzz");
  if (!header) {
    if (header.error().message.empty()) std::abort();
    return 0;
  }
  if (!*header) std::abort();  // there is no more of the file
  for (const auto& entry : (*header)->tensors) {
    if (entry.begin > entry.end || entry.end > size) std::abort();
    if (entry.blocks == 0) continue;
    const GgufBlocks& blocks = gguf_blocks(entry.blocks);
    const auto count = static_cast<std::int64_t>(entry.end - entry.begin) / blocks.bytes;
    std::vector<float> values(static_cast<std::size_t>(count * blocks.values));
    gguf_values(entry.blocks, reinterpret_cast<const std::byte*>(file.data() + entry.begin), count, values.data());
  }
  return 0;
}
