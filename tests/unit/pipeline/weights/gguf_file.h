// GGUF files that tests make.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ditfleet::pipeline {

struct GgufTensor {
  std::string name;
  std::vector<std::int64_t> shape;  // row-major
  std::uint32_t type;               // as in files: 0 is F32
  std::string bytes;
};

inline std::string gguf_number(std::uint64_t value, int bytes) {
  std::string out;
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
  return out;
}
inline std::string gguf_text(const std::string& text) { return gguf_number(text.size(), 8) + text; }

// `keys`: encoded, with their number.
inline std::string gguf_file(const std::vector<GgufTensor>& tensors, const std::string& keys = {},
                             std::uint64_t key_count = 0) {
  std::string file = "GGUF" + gguf_number(3, 4) + gguf_number(tensors.size(), 8) + gguf_number(key_count, 8) + keys,
              data;
  for (const GgufTensor& tensor : tensors) {
    data.resize((data.size() + 31) / 32 * 32);
    file += gguf_text(tensor.name) + gguf_number(tensor.shape.size(), 4);
    for (auto side = tensor.shape.rbegin(); side != tensor.shape.rend(); ++side)
      file += gguf_number(static_cast<std::uint64_t>(*side), 8);
    file += gguf_number(tensor.type, 4) + gguf_number(data.size(), 8);
    data += tensor.bytes;
  }
  file.resize((file.size() + 31) / 32 * 32);
  return file + data;
}

}  // namespace ditfleet::pipeline
