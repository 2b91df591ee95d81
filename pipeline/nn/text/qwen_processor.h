// Makes patches for Qwen2.5-VL's vision tower of pictures (transformers Qwen2VLImageProcessor, with PIL).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>

#include "pipeline/nn/text/picture_tokens.h"
#include "shared/media/media.h"

namespace ditfleet::pipeline {

struct QwenProcessor {
  std::int64_t patch_size = 14, temporal_patch_size = 2, merge_size = 2;
  std::int64_t min_pixels = 56 * 56, max_pixels = 28 * 28 * 1280;
  double rescale_factor = 1.0 / 255;
  std::array<double, 3> mean{0.48145466, 0.4578275, 0.40821073}, std{0.26862954, 0.26130258, 0.27577711};

  // The width and height that a picture gets, multiples of patch_size · merge_size: transformers' smart_resize. Throws
  // Failure (kInvalidArgument) if one side is more than 200 times the other. Thread-safe.
  std::pair<int, int> resized(int width, int height) const;

  // Resizes the picture and cuts it into patches: [rows · columns, 3 · temporal_patch_size · patch_size²] fp32 on the
  // CPU. The merge_size² patches of a token follow one another, and tokens go row by row. In a patch the order is
  // channel, frame, row, column; all frames are the picture. Throws what resized() throws. Thread-safe.
  PictureTokens patches(const media::Media& picture) const;
};

// Reads processor_config.json as transformers 5 writes it, else preprocessor_config.json. Throws what ConfigFile
// throws, and Failure (kDataCorrupt) for a step or a filter that is not supported.
QwenProcessor read_qwen_processor(const std::string& dir);

}  // namespace ditfleet::pipeline
