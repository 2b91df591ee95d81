// Checks raw bytes of a tensor for finite numbers.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "pipeline/weights/safetensors.h"

namespace ditfleet::pipeline {

// False if there is a NaN or an infinity. Empty for an element type other than F32, BF16, F16 and F64, the types of
// adapters.
std::optional<bool> all_finite(DType dtype, std::span<const std::byte> bytes);

}  // namespace ditfleet::pipeline
