// A safetensors or GGUF file, read with pread(2): a file that is truncated meanwhile is an error, not a signal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shared/safetensors/header.h"

namespace ditfleet::pipeline {

// shared/safetensors implements the format; the coordinator checks headers with it.
using safetensors::DType;
using safetensors::dtype_bits;
using safetensors::dtype_from_name;
using safetensors::dtype_name;
using safetensors::parse_safetensors_header;
using safetensors::SafetensorsHeader;
using safetensors::shape_text;
using safetensors::tensor_bytes;
using safetensors::TensorEntry;

// One tensor in memory, valid while the file is open. Row-major, little-endian, aligned for every element type.
struct TensorView {
  std::string_view name;
  DType dtype = DType::kF32;
  std::span<const std::int64_t> shape;
  std::span<const std::byte> bytes;
  std::shared_ptr<const std::byte[]> memory;  // owns the bytes
};

// Copies share the open file and its entries. Const members may be called from any thread.
class SafetensorsFile {
 public:
  // Opens the file and checks its header; reads no weights. The first bytes tell the format. Errors: kNotFound,
  // kUnavailable (unreadable), kDataCorrupt; the message contains the file.
  static Result<SafetensorsFile> open(const std::string& path);

  const std::string& path() const;
  const std::vector<TensorEntry>& entries() const;  // sorted by name
  const std::map<std::string, std::string>& metadata() const;

  const TensorEntry* find(std::string_view name) const;  // null if the file has no such tensor
  bool contains(std::string_view name) const { return find(name) != nullptr; }
  // kNotFound: the message contains file and tensor. Also the errors of read().
  Result<TensorView> tensor(std::string_view name) const;
  Result<TensorView> view(const TensorEntry& entry) const;  // entry: one of entries()
  // Reads bytes of the tensor from its byte `begin` on. kDataCorrupt: the file is shorter than when it was opened.
  // kUnavailable: it cannot be read.
  Result<void> read(const TensorEntry& entry, std::uint64_t begin, std::span<std::byte> into) const;

 private:
  struct State;
  explicit SafetensorsFile(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  std::shared_ptr<const State> state_;
};

// The file's path, inode, size and time of change: equal as long as the file is not replaced. Empty if there is none.
std::string file_identity(const std::string& path);

}  // namespace ditfleet::pipeline
