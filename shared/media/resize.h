// Resizes pictures as PIL does, because models see its rounding.
#pragma once

#include "shared/media/media.h"

namespace ditfleet::media {

// Lanczos with a = 3, in 8 bits, equal to PIL.Image.resize(…, LANCZOS) of Pillow 13. Also enlarges. `image` has one
// frame. Precondition: all sides are positive. Thread-safe.
Media resize_lanczos(const Media& image, int width, int height);

}  // namespace ditfleet::media
