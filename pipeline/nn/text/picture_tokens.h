// A picture as tokens.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ditfleet::pipeline {

// Patches of QwenProcessor (qwen_processor.h), or what QwenVision (qwen_vision.h) makes of them for QwenEncoder.
struct PictureTokens {
  at::Tensor tokens;  // [rows · columns, width]
  std::int64_t rows, columns;
};

}  // namespace ditfleet::pipeline
