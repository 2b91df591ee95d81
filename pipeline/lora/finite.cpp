#include "pipeline/lora/finite.h"

#include <cstdint>
#include <cstring>

namespace ditfleet::pipeline {
namespace {

// Whether no element's exponent is all ones.
template <class Word>
bool none_has(Word exponent, std::span<const std::byte> bytes) {
  const std::size_t count = bytes.size() / sizeof(Word);
  bool finite = true;
  for (std::size_t i = 0; i < count; ++i) {
    Word word;
    std::memcpy(&word, bytes.data() + i * sizeof(Word), sizeof(Word));
    finite &= (word & exponent) != exponent;
  }
  return finite;
}

}  // namespace

std::optional<bool> all_finite(DType dtype, std::span<const std::byte> bytes) {
  switch (dtype) {
    case DType::kF32: return none_has<std::uint32_t>(0x7f800000u, bytes);
    case DType::kBF16: return none_has<std::uint16_t>(0x7f80u, bytes);
    case DType::kF16: return none_has<std::uint16_t>(0x7c00u, bytes);
    case DType::kF8E4M3: return none_has<std::uint8_t>(0x7fu, bytes);  // it has no infinity
    case DType::kF8E5M2: return none_has<std::uint8_t>(0x7cu, bytes);
    case DType::kF64: return none_has<std::uint64_t>(0x7ff0000000000000u, bytes);
    default: return {};
  }
}

}  // namespace ditfleet::pipeline
