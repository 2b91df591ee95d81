// What a model generates: an image or a video.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shared/core/result.h"
#include "shared/job/output_format.h"

namespace ditfleet::pipeline {

// Frames in order; an image has one. A frame is width · height · 3 bytes: interleaved RGB, 8 bits, rows from the top.
struct Media {
  int width = 0, height = 0, frames = 1;
  double frame_rate = 0;  // frames per second; 0 for an image
  std::vector<std::uint8_t> rgb;
};

// Encodes media as a file. `quality`: 0 to 100, for JPEG and WebP; PNG ignores it. Several frames need WebP.
// Errors: kInvalidArgument (bad sizes, a quality out of range, several frames as PNG or JPEG). Thread-safe.
Result<std::string> encode_media(const Media& media, job::OutputFormat format, int quality);

}  // namespace ditfleet::pipeline
