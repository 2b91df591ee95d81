// One encoder a format. The image is checked (encode_image): sides above 0, as many bytes as it says. All are
// thread safe; the same image gives the same bytes with the same library.
#pragma once

#include <string>

#include "pipeline/engine.h"

namespace ditfleet::pipeline::media {

Result<std::string> encode_png(const Image& image);  // 8-bit RGB, not interlaced
Result<std::string> encode_jpeg(const Image& image,
                                int quality);  // 4:2:0; kInvalidArgument above 65500 a side
Result<std::string> encode_webp(const Image& image,
                                int quality);  // lossy; kInvalidArgument above 16383 a side

}  // namespace ditfleet::pipeline::media
