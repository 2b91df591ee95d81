// Resizes and converts pictures as PIL does, because models see its rounding.
#pragma once

#include "shared/media/media.h"

namespace ditfleet::media {

// In 8 bits, equal to PIL.Image.resize of Pillow 13 with LANCZOS (a = 3) or BICUBIC (a = −0.5). Also enlarges. `image`
// has one frame. Precondition: all sides are positive. Thread-safe.
Media resize_lanczos(const Media& image, int width, int height);
Media resize_bicubic(const Media& image, int width, int height);

// The part around the center, equal to PIL.Image.crop from ((image.width − width) // 2, (image.height − height) // 2).
// Precondition: it is no larger than `image`, which has one frame. Thread-safe.
Media crop_center(const Media& image, int width, int height);

// A byte for each pixel, equal to PIL.Image.convert("L"): ITU-R 601-2's luma, rounded. Thread-safe.
std::vector<std::uint8_t> grey(const Media& image);

}  // namespace ditfleet::media
