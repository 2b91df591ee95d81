// The reader of each format. The file begins with the format's signature.
#pragma once

#include <string>

#include "shared/media/image_file.h"

namespace ditfleet::media {

struct Header {
  std::int64_t width = 0, height = 0;          // as stored, not upright
  std::string_view exif = {};                  // a TIFF structure, perhaps after "Exif\0\0", in the file; empty: none
  std::int64_t most_pixels = kMaxWholePixels;  // that a file of this kind may have
  bool has_alpha = false;                      // also for one transparent color
};

// Whether a picture is read at half its size. Rounds up.
inline bool is_halved(const Header& header) { return header.width * header.height > kMaxWholePixels; }
inline std::int64_t halved(std::int64_t side) { return (side + 1) / 2; }

// Segments or chunks of one file. A JPEG of 20 MiB needs 320 for metadata, a PNG of 20 MiB usually 2,560 for pixels.
inline constexpr int kMostChunks = 1 << 16;

// Walks over the file's chunks without the format's library, and without reading or inflating what is in the others.
// kInvalidArgument: decode would refuse the file for its structure, too. The size is not checked.
Result<Header> png_header(std::string_view file);
Result<Header> jpeg_header(std::string_view file);
Result<Header> webp_header(std::string_view file);
Result<Header> bmp_header(std::string_view file);
Result<Header> gif_header(std::string_view file);

// The pixels as stored, not upright, at half the size if is_halved(). Allocates memory for that size. `mask`: 255 −
// alpha three times a pixel instead of colors; Header::has_alpha is then true. kInvalidArgument, with the library's
// reason.
Result<Media> decode_png(std::string_view file, const Header& header, bool mask);
Result<Media> decode_jpeg(std::string_view file, const Header& header, bool mask);
Result<Media> decode_webp(std::string_view file, const Header& header, bool mask);
Result<Media> decode_bmp(std::string_view file, const Header& header, bool mask);
Result<Media> decode_gif(std::string_view file, const Header& header, bool mask);  // its first picture

Error damaged(std::string_view format, std::string_view why);

// Integers in a file. Precondition: the bytes are in it.
inline std::uint32_t big_endian(std::string_view file, std::size_t at, std::size_t bytes) {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < bytes; ++i) value = value << 8 | static_cast<unsigned char>(file[at + i]);
  return value;
}
inline std::uint32_t little_endian(std::string_view file, std::size_t at, std::size_t bytes) {
  std::uint32_t value = 0;
  while (bytes-- > 0) value = value << 8 | static_cast<unsigned char>(file[at + bytes]);
  return value;
}

}  // namespace ditfleet::media
