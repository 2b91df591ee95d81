// One encoder per format that needs all frames at once, for media that writer.cpp has checked. `quality`: 0 to 100.
// Thread-safe. With the same library the same media gives the same bytes.
#pragma once

#include <string>

#include "shared/core/result.h"
#include "shared/media/media.h"

namespace ditfleet::media {

// 8-bit RGB, not interlaced. `comment`: of a tEXt chunk; empty: none.
Result<std::string> encode_png(const Media& image, const std::string& comment);
// 4:2:0. kInvalidArgument: a side above 65500.
Result<std::string> encode_jpeg(const Media& image, int quality);
// Lossy; animated if there are several frames. kInvalidArgument: a side above 16383.
Result<std::string> encode_webp(const Media& media, int quality);

}  // namespace ditfleet::media
