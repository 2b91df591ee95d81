// One encoder per format, for media that encode_media() has checked. Thread-safe. With the same library the same media
// gives the same bytes.
#pragma once

#include <string>

#include "pipeline/api/media.h"

namespace ditfleet::pipeline::media {

Result<std::string> encode_png(const Media& image);  // 8-bit RGB, not interlaced
// 4:2:0. kInvalidArgument: a side above 65500.
Result<std::string> encode_jpeg(const Media& image, int quality);
// Lossy. kInvalidArgument: a side above 16383.
Result<std::string> encode_webp(const Media& image, int quality);
Result<std::string> encode_animated_webp(const Media& video, int quality);

}  // namespace ditfleet::pipeline::media
