// The first picture of a GIF (CompuServe, "GIF89a Specification"), on its screen. Pixels are those of Pillow 13.
#include <algorithm>
#include <array>
#include <optional>

#include "shared/media/formats.h"

namespace ditfleet::media {
namespace {

constexpr int kNoColor = -1;

struct Picture {
  std::int64_t screen_width = 0, screen_height = 0;
  std::size_t left = 0, top = 0, width = 0, height = 0;
  bool interlaced = false;
  int transparent = kNoColor;
  std::string_view palette;  // red, green, blue; empty: shades of gray
  std::string_view data;     // the code size, then blocks of codes
};

std::size_t palette_bytes(unsigned flags) { return flags & 0x80 ? std::size_t{3} << ((flags & 7) + 1) : 0; }

Result<Picture> parse(std::string_view file) {
  const auto truncated = damaged("GIF", "the file is truncated");
  if (file.size() < 13) return truncated;
  Picture out{.screen_width = little_endian(file, 6, 2), .screen_height = little_endian(file, 8, 2)};
  std::size_t at = 13;
  const std::size_t own = palette_bytes(big_endian(file, 10, 1));
  if (file.size() - at < own) return truncated;
  out.palette = file.substr(at, own);
  at += own;
  for (int blocks = 0; blocks < kMostChunks; ++blocks) {
    if (file.size() - at < 2) return truncated;
    const unsigned kind = big_endian(file, at, 1);
    if (kind == 0x2c) {  // a picture
      if (file.size() - at < 10) return truncated;
      out.left = little_endian(file, at + 1, 2);
      out.top = little_endian(file, at + 3, 2);
      out.width = little_endian(file, at + 5, 2);
      out.height = little_endian(file, at + 7, 2);
      const unsigned flags = big_endian(file, at + 9, 1);
      out.interlaced = (flags & 0x40) != 0;
      at += 10;
      const std::size_t local = palette_bytes(flags);
      if (file.size() - at <= local) return truncated;
      if (local > 0) out.palette = file.substr(at, local);
      out.data = file.substr(at + local);
      if (out.width == 0 || out.height == 0) return damaged("GIF", "its picture has no pixels");
      out.screen_width = std::max<std::int64_t>(out.screen_width, static_cast<std::int64_t>(out.left + out.width));
      out.screen_height = std::max<std::int64_t>(out.screen_height, static_cast<std::int64_t>(out.top + out.height));
      return out;
    }
    if (kind != 0x21) return damaged("GIF", "it has no picture");
    // The flags of a graphic control extension, and the transparent color.
    if (big_endian(file, at + 1, 1) == 0xf9 && file.size() - at >= 8 && (big_endian(file, at + 3, 1) & 1) != 0)
      out.transparent = static_cast<int>(big_endian(file, at + 6, 1));
    at += 2;
    for (std::size_t length = 1; length > 0 && blocks < kMostChunks; ++blocks) {
      if (at >= file.size()) return truncated;
      length = big_endian(file, at, 1);
      if (file.size() - at <= length) return truncated;
      at += 1 + length;
    }
  }
  return damaged("GIF", "it has more than " + std::to_string(kMostChunks) + " blocks before its picture");
}

// The bits of the codes, from blocks of up to 255 bytes.
class Bits {
 public:
  explicit Bits(std::string_view blocks) : blocks_(blocks) {}
  // Nothing at the end of the data.
  std::optional<unsigned> take(unsigned count) {
    while (held_ < count) {
      if (left_ == 0) {
        if (at_ >= blocks_.size() || blocks_[at_] == 0) return std::nullopt;
        left_ = static_cast<unsigned char>(blocks_[at_++]);
      }
      if (at_ >= blocks_.size()) return std::nullopt;
      bits_ |= static_cast<unsigned>(static_cast<unsigned char>(blocks_[at_++])) << held_;
      held_ += 8;
      --left_;
    }
    const unsigned code = bits_ & ((1U << count) - 1);
    bits_ >>= count;
    held_ -= count;
    return code;
  }

 private:
  std::string_view blocks_;
  std::size_t at_ = 0, left_ = 0;
  unsigned bits_ = 0, held_ = 0;
};

// Decompresses LZW into `out`. False: damaged, or not enough data.
bool decompress(std::string_view data, std::vector<std::uint8_t>& out) {
  constexpr unsigned kMostCodes = 4096, kNone = kMostCodes;
  const unsigned first = static_cast<unsigned char>(data.front());
  if (first < 1 || first > 8) return false;
  const unsigned clear = 1U << first, end = clear + 1;
  std::array<std::uint16_t, kMostCodes> prefix;
  std::array<std::uint8_t, kMostCodes> suffix, reversed;
  Bits bits(data.substr(1));
  unsigned width = first + 1, next = end + 1, last = kNone;
  std::uint8_t initial = 0;  // of the last code's string
  for (std::size_t at = 0; at < out.size();) {
    const auto read = bits.take(width);
    if (!read || *read == end) return false;
    if (*read == clear) {
      width = first + 1, next = end + 1, last = kNone;
      continue;
    }
    if (*read > next || (last == kNone && *read >= clear) || (*read == next && last == kNone)) return false;
    std::size_t length = 0;
    unsigned code = *read;
    if (code == next) {  // the string that this code completes
      reversed[length++] = initial;
      code = last;
    }
    for (; code > end; code = prefix[code]) {
      if (length >= reversed.size() - 1) return false;
      reversed[length++] = suffix[code];
    }
    initial = reversed[length++] = static_cast<std::uint8_t>(code);
    for (; length > 0 && at < out.size(); ++at) out[at] = reversed[--length];
    if (last != kNone && next < kMostCodes) {
      prefix[next] = static_cast<std::uint16_t>(last);
      suffix[next] = initial;
      if (++next == 1U << width && width < 12) ++width;
    }
    last = *read;
  }
  return true;
}

}  // namespace

Result<Header> gif_header(std::string_view file) {
  const auto picture = parse(file);
  if (!picture) return picture.error();
  return Header{
      .width = picture->screen_width, .height = picture->screen_height, .has_alpha = picture->transparent != kNoColor};
}

Result<Media> decode_gif(std::string_view file, const Header&, bool mask) {
  const auto parsed = parse(file);
  if (!parsed) return parsed.error();
  const Picture& p = *parsed;
  std::vector<std::uint8_t> colors(p.width * p.height);
  if (!decompress(p.data, colors)) return damaged("GIF", "its pixels are damaged or truncated");
  Media image{.width = static_cast<int>(p.screen_width), .height = static_cast<int>(p.screen_height)};
  const auto paint = [&](std::uint8_t* to, unsigned color) {
    for (std::size_t c = 0; c < 3; ++c)
      to[c] = mask                ? static_cast<std::uint8_t>(static_cast<int>(color) == p.transparent ? 255 : 0)
              : p.palette.empty() ? static_cast<std::uint8_t>(color)
              : 3 * color + c >= p.palette.size() ? 0
                                                  : static_cast<std::uint8_t>(p.palette[3 * color + c]);
  };
  const auto stride = static_cast<std::size_t>(p.screen_width);
  image.rgb.resize(3 * stride * static_cast<std::size_t>(p.screen_height));
  // Around the picture is the transparent color, as in Pillow.
  for (std::size_t i = 0; i < image.rgb.size(); i += 3)
    paint(&image.rgb[i], p.transparent == kNoColor ? 0 : static_cast<unsigned>(p.transparent));
  std::size_t line = 0;  // of `colors`
  const auto draw = [&](std::size_t begin, std::size_t step) {
    for (std::size_t y = begin; y < p.height; y += step, ++line)
      for (std::size_t x = 0; x < p.width; ++x)
        paint(&image.rgb[3 * ((p.top + y) * stride + p.left + x)], colors[line * p.width + x]);
  };
  if (p.interlaced) {
    draw(0, 8);
    draw(4, 8);
    draw(2, 4);
    draw(1, 2);
  } else {
    draw(0, 1);
  }
  return image;
}

}  // namespace ditfleet::media
