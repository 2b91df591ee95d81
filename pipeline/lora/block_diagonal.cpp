#include "pipeline/lora/block_diagonal.h"
#include "shared/safetensors/values.h"

#include <bit>

namespace ditfleet::pipeline {
namespace {

static_assert(std::endian::native == std::endian::little);  // as in the file: the sign is in an element's last byte

}  // namespace

bool all_zero(std::span<const std::byte> bytes, std::size_t element) {
  constexpr std::byte kSign{0x80};
  for (std::size_t i = 0; i < bytes.size(); ++i)
    if (bytes[i] != std::byte{0} && (bytes[i] != kSign || i % element != element - 1)) return false;
  return true;
}

bool is_block_diagonal(const TensorView& up, std::span<const LoraPiece> linears) {
  const auto count = static_cast<std::int64_t>(linears.size());
  if (count == 0 || up.shape.size() != 2 || up.shape[1] % count != 0 || !safetensors::all_finite(up.dtype, {}))
    return false;
  const auto element = static_cast<std::size_t>(dtype_bits(up.dtype)) / 8;
  const std::size_t row = static_cast<std::size_t>(up.shape[1]) * element, block = row / linears.size();
  std::size_t begin = 0;  // within the row
  for (std::size_t linear = 0; linear < linears.size(); ++linear) {
    for (std::int64_t i = 0; i < linears[linear].rows; ++i, begin += row) {
      const auto values = up.bytes.subspan(begin, row);
      if (!all_zero(values.first(linear * block), element) || !all_zero(values.subspan((linear + 1) * block), element))
        return false;
    }
  }
  return true;
}

}  // namespace ditfleet::pipeline
