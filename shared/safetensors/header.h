// Parses and checks the header of a safetensors file.
//
// Format (huggingface/safetensors, README "Format"): u64 little-endian length N, N bytes of JSON that begin
// with '{' and may end in spaces, then the tensors' bytes. The JSON maps a tensor's name to
// {"dtype", "shape", "data_offsets": [begin, end)}, offsets counted from the end of the header; the key
// "__metadata__" maps strings to strings.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "shared/core/result.h"
#include "shared/safetensors/dtype.h"

namespace ditfleet::safetensors {

inline constexpr std::uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;

struct TensorEntry {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;   // every extent ≥ 0; empty for a scalar
  std::uint64_t begin = 0, end = 0;  // byte range from the start of the file
  std::uint8_t blocks = 0;           // of a GGUF file: the format of its blocks; 0: elements of `dtype`
};

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;             // sorted by name
  std::map<std::string, std::string> metadata;  // "__metadata__"; empty if there is none
};

// Parses the header of `file`, which is the whole file (mapped or in memory). Reads only the header's bytes.
// `file_name` is for messages. Thread-safe. kDataCorrupt: the header is longer than the file or
// kMaxSafetensorsHeaderBytes; the JSON is invalid or has duplicate keys; a dtype is unknown; the length of a range does
// not match dtype and shape; or the ranges do not cover the data exactly, without gaps and overlaps. The message says
// which tensor is wrong.
Result<SafetensorsHeader> parse_safetensors_header(std::string_view file, std::string_view file_name);

// Parses the header from `begin`, the first bytes of a file of `file_bytes` bytes. They must include the whole header
// (safetensors_header_end), unless the file is shorter.
Result<SafetensorsHeader> parse_safetensors_header(std::string_view begin, std::uint64_t file_bytes,
                                                   std::string_view file_name);

// Returns the offset of the data, from the first 8 bytes of a file. kDataCorrupt: there are fewer than 8 bytes, or the
// header is longer than kMaxSafetensorsHeaderBytes.
Result<std::uint64_t> safetensors_header_end(std::string_view begin, std::string_view file_name);

// Returns the size of a tensor. kInvalidArgument: a negative extent, a size beyond 63 bits, or packed elements that do
// not fill whole bytes.
Result<std::uint64_t> tensor_bytes(DType dtype, const std::vector<std::int64_t>& shape);

std::string shape_text(const std::vector<std::int64_t>& shape);  // "[1, 16, 64]"

}  // namespace ditfleet::safetensors
