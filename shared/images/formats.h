// The reader of each format. The file begins with the format's signature.
#pragma once

#include <string>

#include "shared/images/image_file.h"

namespace ditfleet::images {

struct Picture {
  Image image;       // as stored, not upright; without pixels if only the header was read
  std::string exif;  // a TIFF structure, perhaps after "Exif\0\0"; empty: none
};

// Checks the size before it allocates the pixels. `with_pixels`: false reads only the header.
// kInvalidArgument, with the library's reason.
Result<Picture> read_png(std::string_view file, bool with_pixels);
Result<Picture> read_jpeg(std::string_view file, bool with_pixels);
Result<Picture> read_webp(std::string_view file, bool with_pixels);

// kInvalidArgument: more than kMaxPixels, or no pixels.
Result<void> check_size(std::int64_t width, std::int64_t height);
Error damaged(std::string_view format, std::string_view why);

}  // namespace ditfleet::images
