// The header of a safetensors file, checked before anything is believed.
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
  std::uint64_t begin = 0, end = 0;  // byte range in the file (not in the data part)
};

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;             // sorted by name
  std::map<std::string, std::string> metadata;  // "__metadata__"; empty if there is none
};

// Reads the header at the start of `file`, which is the whole file (mapped or in memory). Touches only the
// header's bytes. `file_name` is for messages.
// kDataCorrupt says which tensor is wrong and how, unless all of this holds: the length is at most
// kMaxSafetensorsHeaderBytes and inside the file; the JSON is strict, with no key twice; each dtype is
// known; each range is as long as dtype × shape says; the ranges together cover the data part to the file's
// last byte with neither holes nor overlaps. Thread-safe.
Result<SafetensorsHeader> parse_safetensors_header(std::string_view file, std::string_view file_name);

// The same where only the beginning of a file of `file_bytes` bytes is at hand: `begin` reaches to the end of the
// header at least (safetensors_header_end), if the file does.
Result<SafetensorsHeader> parse_safetensors_header(std::string_view begin, std::uint64_t file_bytes,
                                                   std::string_view file_name);

// Where the header ends and the data begin, from the first 8 bytes of a file. kDataCorrupt: a length above
// kMaxSafetensorsHeaderBytes, or fewer bytes.
Result<std::uint64_t> safetensors_header_end(std::string_view begin, std::string_view file_name);

// Bytes that a tensor of this type and shape takes; kInvalidArgument for a negative extent, a size beyond 63
// bits, or packed elements that do not fill whole bytes.
Result<std::uint64_t> tensor_bytes(DType dtype, const std::vector<std::int64_t>& shape);

std::string shape_text(const std::vector<std::int64_t>& shape);  // "[1, 16, 64]"

}  // namespace ditfleet::safetensors
