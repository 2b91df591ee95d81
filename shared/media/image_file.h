// Reads the images that clients send. Thread-safe; no function keeps a reference to the bytes.
#pragma once

#include <cstdint>
#include <string_view>

#include "shared/core/result.h"
#include "shared/media/media.h"

namespace ditfleet::media {

inline constexpr std::int64_t kMaxPixels = 1 << 25;  // width × height, 33.5 megapixels

struct Info {
  std::string_view media_type;  // image/png, image/jpeg or image/webp; a literal
  int width = 0, height = 0;    // upright, as the EXIF orientation says
};

// Reads the header: at most 10 ms, whatever the file has. kInvalidArgument: not a PNG, JPEG or WebP file, more than
// kMaxPixels, animated, CMYK, or of a structure that decode() would refuse.
Result<Info> inspect(std::string_view file);

// Reads the pixels and turns them upright. Transparency is dropped. Takes up to two seconds for kMaxPixels.
// kInvalidArgument: as inspect(), and for a truncated or damaged file.
Result<Media> decode(std::string_view file);

}  // namespace ditfleet::media
