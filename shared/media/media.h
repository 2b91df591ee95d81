// Pixels of an image or a video.
#pragma once

#include <cstdint>
#include <vector>

namespace ditfleet::media {

// Frames in order; an image has one. A frame is width · height · 3 bytes: interleaved RGB, 8 bits, rows from the top.
struct Media {
  int width = 0, height = 0, frames = 1;
  double frame_rate = 0;  // frames per second; 0 for an image
  std::vector<std::uint8_t> rgb;
};

}  // namespace ditfleet::media
