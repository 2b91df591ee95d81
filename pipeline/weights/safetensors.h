// A safetensors file, mapped read-only.
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

// One tensor of an open file. `bytes` points into the read-only mapping and is valid while the file is open. Row-major,
// little-endian, NOT aligned to the element size (a header may have any length): use memcpy, or check the address
// before casting.
struct TensorView {
  std::string_view name;
  DType dtype = DType::kF32;
  std::span<const std::int64_t> shape;
  std::span<const std::byte> bytes;
};

// Movable; moving keeps views valid. Const members may be called from any thread.
class SafetensorsFile {
 public:
  // Maps the file and checks its header; reads no weights. Errors: kNotFound, kUnavailable (unreadable), kDataCorrupt;
  // the message contains the file.
  static Result<SafetensorsFile> open(const std::string& path);

  const std::string& path() const;
  const std::vector<TensorEntry>& entries() const;  // sorted by name
  const std::map<std::string, std::string>& metadata() const;

  bool contains(std::string_view name) const;
  // kNotFound: the message contains file and tensor.
  Result<TensorView> tensor(std::string_view name) const;
  TensorView view(const TensorEntry& entry) const;  // entry: one of entries()

 private:
  struct State;
  explicit SafetensorsFile(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  std::shared_ptr<const State> state_;
};

}  // namespace ditfleet::pipeline
