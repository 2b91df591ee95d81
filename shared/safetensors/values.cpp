#include "shared/safetensors/values.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace ditfleet::safetensors {
namespace {

template <class Word>
Word word_at(std::span<const std::byte> bytes, std::size_t index) {
  Word word;
  std::memcpy(&word, bytes.data() + index * sizeof(Word), sizeof(Word));
  return word;
}

// Whether no element's exponent is all ones.
template <class Word>
bool none_has(Word exponent, std::span<const std::byte> bytes) {
  bool finite = true;
  for (std::size_t i = 0; i < bytes.size() / sizeof(Word); ++i)
    finite &= (word_at<Word>(bytes, i) & exponent) != exponent;
  return finite;
}

double half_to_double(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return bits & 0x8000 ? -size : size;
}

double f8_e4m3_to_double(std::uint8_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  const double size = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return bits & 0x80 ? -size : size;
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

std::optional<double> number_of(DType dtype, std::span<const std::byte> bytes) {
  if (bytes.size() * 8 != static_cast<std::size_t>(dtype_bits(dtype))) return {};
  if (dtype == DType::kI64) return static_cast<double>(word_at<std::int64_t>(bytes, 0));
  if (dtype == DType::kI32) return static_cast<double>(word_at<std::int32_t>(bytes, 0));
  if (!all_finite(dtype, bytes).value_or(false)) return {};
  switch (dtype) {
    case DType::kF32: return std::bit_cast<float>(word_at<std::uint32_t>(bytes, 0));
    case DType::kBF16: return std::bit_cast<float>(std::uint32_t{word_at<std::uint16_t>(bytes, 0)} << 16);
    case DType::kF16: return half_to_double(word_at<std::uint16_t>(bytes, 0));
    case DType::kF8E5M2: return half_to_double(static_cast<std::uint16_t>(word_at<std::uint8_t>(bytes, 0) << 8));
    case DType::kF8E4M3: return f8_e4m3_to_double(word_at<std::uint8_t>(bytes, 0));
    default: return word_at<double>(bytes, 0);
  }
}

}  // namespace ditfleet::safetensors
