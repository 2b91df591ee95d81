// The values of tensors: numbers of the types F32, BF16, F16, F64, F8_E4M3 and F8_E5M2.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "shared/safetensors/dtype.h"

namespace ditfleet::safetensors {

// False if there is a NaN or an infinity. Empty for another type. Thread-safe.
std::optional<bool> all_finite(DType dtype, std::span<const std::byte> bytes);

// The number, if there is one, and it is finite. Also of I64 and I32. Thread-safe.
std::optional<double> number_of(DType dtype, std::span<const std::byte> bytes);

}  // namespace ditfleet::safetensors
