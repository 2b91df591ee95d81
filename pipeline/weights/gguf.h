// GGUF files: the header, and the block formats that quantized tensors have.
//
// Format (ggml-org/ggml, docs/gguf.md): little-endian; the magic "GGUF", a version, the numbers of tensors and keys;
// the keys with typed values; for each tensor a name, its sides (the last axis first), a type and an offset; then, at a
// multiple of general.alignment, the data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "shared/safetensors/header.h"

namespace ditfleet::pipeline {

// Consecutive values of a row share a block. TensorEntry::blocks is the number of one of these.
struct GgufBlocks {
  std::string_view name;  // "Q4_K"
  std::uint32_t id;       // in files
  int values, bytes;      // of a block
};
const GgufBlocks& gguf_blocks(std::uint8_t number);  // from 1 on
std::uint8_t gguf_block_count();
// The values of whole blocks, in fp32, bit for bit as the package gguf computes them.
void gguf_values(std::uint8_t number, const std::byte* blocks, std::int64_t count, float* values);

inline bool is_gguf(std::string_view begin) { return begin.starts_with("GGUF"); }

// Parses the header from the first bytes of a file of `file_bytes` bytes. Nothing if more of the file is needed. The
// entries' shapes are row-major; quantized tensors have the type U8 and TensorEntry::blocks. Metadata: the keys with
// text, up to 1 KiB each.
// kDataCorrupt: a wrong magic or version; more than 100,000 tensors or keys; a name, text or array beyond the file; a
// type that is unknown or not supported (the message names it); a row that is no multiple of its blocks; offsets that
// are not aligned, overlap, or lie beyond the file.
Result<std::optional<safetensors::SafetensorsHeader>> parse_gguf_header(std::string_view begin,
                                                                        std::uint64_t file_bytes,
                                                                        std::string_view file_name);

}  // namespace ditfleet::pipeline
