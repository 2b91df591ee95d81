// Whether numbers as they lie in a file or in memory are all finite.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "pipeline/weights/safetensors.h"

namespace ditfleet::pipeline {

// False: there is a NaN or an infinity. Empty: of an element type that adapters do not come in (F32, BF16, F16 and F64
// they do).
std::optional<bool> all_finite(DType dtype, std::span<const std::byte> bytes);

}  // namespace ditfleet::pipeline
