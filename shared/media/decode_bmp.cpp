// BMP: a file header, a DIB header of one of several lengths, a palette, then rows from the bottom up, padded to four
// bytes (Microsoft, "Bitmap Storage"). Pixels are those of Pillow 13.
#include <algorithm>
#include <array>

#include "shared/media/formats.h"

namespace ditfleet::media {
namespace {

constexpr std::size_t kFileHeader = 14;
constexpr std::uint32_t kPlain = 0, kMasks = 3;  // compression

struct Bitmap {
  std::int64_t width = 0, height = 0;
  bool top_down = false;
  unsigned bits = 0;                     // of a pixel
  std::array<std::uint32_t, 3> masks{};  // of red, green, blue in a pixel of 16 or 32 bits
  std::string_view palette;              // blue, green, red and perhaps a fourth byte
  std::size_t entry = 4;                 // bytes of one color
  std::string_view pixels;
  std::size_t stride = 0;
};

Result<Bitmap> parse(std::string_view file) {
  const auto wrong = [](const char* why) { return damaged("BMP", why); };
  if (file.size() < kFileHeader + 12) return wrong("the file is truncated");
  const std::size_t pixels = little_endian(file, 10, 4), header = little_endian(file, kFileHeader, 4);
  if (header < 12 || header > 124 || file.size() - kFileHeader < header) return wrong("its header has a wrong length");
  const std::string_view dib = file.substr(kFileHeader, header);
  Bitmap out;
  std::uint32_t compression = kPlain, colors = 0;
  if (header < 16) {  // OS/2's
    out.width = little_endian(dib, 4, 2);
    out.height = little_endian(dib, 6, 2);
    out.bits = little_endian(dib, 10, 2);
    out.entry = 3;
  } else {
    if (header < 40) return wrong("its header is of an unknown kind");
    const auto height = static_cast<std::int32_t>(little_endian(dib, 8, 4));
    out.width = static_cast<std::int32_t>(little_endian(dib, 4, 4));
    out.height = height < 0 ? -std::int64_t{height} : height;
    out.top_down = height < 0;
    out.bits = little_endian(dib, 14, 2);
    compression = little_endian(dib, 16, 4);
    colors = little_endian(dib, 32, 4);
  }
  if (compression != kPlain && compression != kMasks) return wrong("it is compressed; send a plain BMP or a PNG");
  if (out.bits != 1 && out.bits != 4 && out.bits != 8 && out.bits != 16 && out.bits != 24 && out.bits != 32)
    return wrong("its number of bits per pixel is unknown");
  if (out.width <= 0 || out.height <= 0 || pixels > file.size()) return wrong("its size or offset is damaged");
  const std::size_t after = kFileHeader + header;
  if (out.bits == 16) out.masks = {0x7c00, 0x03e0, 0x001f};
  if (out.bits == 32) out.masks = {0xff0000, 0xff00, 0xff};
  if (compression == kMasks) {
    if ((out.bits != 16 && out.bits != 32) || file.size() < kFileHeader + 52) return wrong("its masks are missing");
    for (std::size_t i = 0; i < 3; ++i) out.masks[i] = little_endian(file, kFileHeader + 40 + 4 * i, 4);
    for (const std::uint32_t mask : out.masks)
      if (mask == 0) return wrong("a mask is empty");
  }
  if (out.bits <= 8) {
    const std::size_t count = colors > 0 && colors <= 256 ? colors : std::size_t{1} << out.bits;
    if (after > file.size()) return wrong("its palette is missing");
    out.palette = file.substr(after, count * out.entry);
  }
  out.stride = (static_cast<std::size_t>(out.width) * out.bits + 31) / 32 * 4;
  out.pixels = file.substr(pixels);
  return out;
}

// The bits of a mask, spread over 0 to 255.
std::uint8_t channel(std::uint32_t pixel, std::uint32_t mask) {
  const std::uint32_t low = mask & (~mask + 1), most = mask / low;
  return static_cast<std::uint8_t>((pixel & mask) / low * std::uint64_t{255} / most);
}

}  // namespace

Result<Header> bmp_header(std::string_view file) {
  const auto bitmap = parse(file);
  if (!bitmap) return bitmap.error();
  return Header{bitmap->width, bitmap->height};
}

Result<Media> decode_bmp(std::string_view file, const Header&, bool) {
  const auto parsed = parse(file);
  if (!parsed) return parsed.error();
  const Bitmap& b = *parsed;
  const auto width = static_cast<std::size_t>(b.width), height = static_cast<std::size_t>(b.height);
  if (b.pixels.size() / b.stride < height) return damaged("BMP", "the file is truncated");
  Media image{.width = static_cast<int>(b.width), .height = static_cast<int>(b.height)};
  image.rgb.resize(3 * width * height);
  std::uint8_t* to = image.rgb.data();
  for (std::size_t y = 0; y < height; ++y) {
    const std::string_view row = b.pixels.substr((b.top_down ? y : height - 1 - y) * b.stride, b.stride);
    for (std::size_t x = 0; x < width; ++x, to += 3) {
      if (b.bits == 24) {
        for (std::size_t c = 0; c < 3; ++c) to[c] = static_cast<std::uint8_t>(row[3 * x + 2 - c]);
      } else if (b.bits > 8) {
        const std::uint32_t pixel = little_endian(row, x * b.bits / 8, b.bits / 8);
        for (std::size_t c = 0; c < 3; ++c) to[c] = channel(pixel, b.masks[c]);
      } else {
        const std::size_t bit = x * b.bits;
        const unsigned byte = static_cast<unsigned char>(row[bit / 8]);
        const std::size_t color = (byte >> (8 - b.bits - bit % 8) & ((1U << b.bits) - 1)) * b.entry;
        // A color that the palette lacks is black.
        for (std::size_t c = 0; c < 3 && color + 3 <= b.palette.size(); ++c)
          to[c] = static_cast<std::uint8_t>(b.palette[color + 2 - c]);
      }
    }
  }
  return image;
}

}  // namespace ditfleet::media
