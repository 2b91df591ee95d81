// The element types of safetensors.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace ditfleet::safetensors {

enum class DType {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};

std::string_view dtype_name(DType dtype);                     // "BF16", as in a file's header
std::optional<DType> dtype_from_name(std::string_view name);  // nothing if the name is unknown
int dtype_bits(DType dtype);                                  // of one element: 4 for F4, 16 for BF16

}  // namespace ditfleet::safetensors
