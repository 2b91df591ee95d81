// Reads the images that clients send. Thread-safe; no function keeps a reference to the bytes.
#pragma once

#include <cstdint>
#include <string_view>

#include "shared/core/result.h"
#include "shared/media/media.h"

namespace ditfleet::media {

// Width × height: 134 megapixels, which telephones do not exceed. Above 33.5 megapixels only JPEG and PNG files are
// read, at half their width and height; progressive JPEGs up to 67 megapixels, interlaced PNGs not at all.
inline constexpr std::int64_t kMaxPixels = 1 << 27, kMaxWholePixels = 1 << 25;

struct Info {
  std::string_view media_type;  // image/png, image/jpeg, image/webp, image/bmp or image/gif; a literal
  int width = 0, height = 0;    // upright, as the EXIF orientation says
  bool has_alpha = false;       // an alpha channel or a transparent color; false for JPEG and BMP
};

// Reads the header: at most 10 ms, whatever the file has. kInvalidArgument: not a PNG, JPEG, WebP, BMP or GIF file, too
// many pixels, an animated WebP, or of a structure that decode() would refuse.
Result<Info> inspect(std::string_view file);

// Reads the pixels and turns them upright: the first picture of a GIF, the default picture of an animated PNG.
// Transparency is dropped. 16-bit samples keep their upper bytes (Pillow makes 16-bit gray white). Takes up to five
// seconds for kMaxPixels, and memory for kMaxWholePixels of three bytes, or for a progressive JPEG of 67 megapixels up
// to 400 MB. kInvalidArgument: as inspect(), and for a truncated or damaged file.
Result<Media> decode(std::string_view file);

// Reads the mask of an edit, in which white is to be replaced. Of a file with has_alpha, all channels are 255 − alpha,
// so that transparent pixels are replaced, as in OpenAI's images/edits; the colors do not matter. Of other files, and
// of those without a transparent pixel, it is what decode() returns: models resize the colors before grey(). Costs and
// errors: as decode(), but a WebP takes four bytes a pixel.
Result<Media> decode_mask(std::string_view file);

}  // namespace ditfleet::media
