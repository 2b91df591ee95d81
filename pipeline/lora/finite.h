// Checks raw bytes of a tensor for finite numbers.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "pipeline/weights/safetensors.h"

namespace ditfleet::pipeline {

// False if there is a NaN or an infinity. Empty for an element type that adapters do not have: other than F32, BF16,
// F16, F64, F8_E4M3 and F8_E5M2.
std::optional<bool> all_finite(DType dtype, std::span<const std::byte> bytes);

}  // namespace ditfleet::pipeline
