#include <webp/decode.h>

#include <algorithm>
#include <optional>

#include "shared/media/formats.h"

namespace ditfleet::media {
namespace {

// The size in the header of a lossy (RFC 6386 §9.1) or lossless bitstream. Nothing if it is damaged.
std::optional<Header> bitstream_header(std::string_view type, std::string_view data) {
  if (type == "VP8 ") {
    // A key frame of a known version that is shown.
    if (data.size() < 10 || (big_endian(data, 0, 1) & 0x11) != 0x10 || data.substr(3, 3) != "\x9d\x01\x2a") return {};
    return Header{little_endian(data, 6, 2) & 0x3fff, little_endian(data, 8, 2) & 0x3fff};
  }
  if (data.size() < 5 || data[0] != 0x2f) return {};
  const std::uint32_t bits = little_endian(data, 1, 4);
  return Header{.width = (bits & 0x3fff) + 1, .height = (bits >> 14 & 0x3fff) + 1, .has_alpha = (bits >> 28 & 1) != 0};
}

}  // namespace

Result<Header> webp_header(std::string_view file) {
  const Error bad = damaged("WebP", "its header is damaged");
  std::optional<Header> canvas, picture;
  std::string_view exif;
  bool alpha = false;
  std::size_t at = 12;
  int chunks = 0;
  for (; file.size() - at >= 8; ++chunks) {
    if (chunks == kMostChunks) return damaged("WebP", "it has more than " + std::to_string(kMostChunks) + " chunks");
    const std::string_view type = file.substr(at, 4);
    const std::size_t length = little_endian(file, at + 4, 4);
    const std::string_view data = file.substr(at + 8, length);
    if (type == "VP8X") {
      if (chunks > 0 || length != 10 || data.size() < 10) return bad;
      if ((big_endian(data, 0, 1) & 0x02) != 0) return damaged("WebP", "it is animated; send one picture");
      canvas = Header{little_endian(data, 4, 3) + 1, little_endian(data, 7, 3) + 1};
    } else if ((type == "VP8 " || type == "VP8L") && !picture) {
      picture = bitstream_header(type, data);
      if (!picture) return bad;
    } else if (type == "ALPH" && !picture) {
      alpha = true;
    } else if (type == "EXIF" && exif.empty() && data.size() == length) {
      exif = data;
    }
    if (!canvas) break;  // the simple form has one chunk
    if (data.size() < length + length % 2) break;
    at += 8 + length + length % 2;
  }
  if (!picture || (canvas && (canvas->width != picture->width || canvas->height != picture->height))) return bad;
  picture->exif = exif;
  picture->has_alpha |= alpha;
  return *picture;
}

Result<Media> decode_webp(std::string_view file, const Header& header, bool mask) {
  Media image{.width = static_cast<int>(header.width), .height = static_cast<int>(header.height)};
  const auto width = static_cast<std::size_t>(header.width), pixels = width * static_cast<std::size_t>(header.height);
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(file.data());
  WebPBitstreamFeatures features;
  if (WebPGetFeatures(bytes, file.size(), &features) != VP8_STATUS_OK || features.width != header.width ||
      features.height != header.height)
    return damaged("WebP", "its header is damaged");
  const std::size_t channels = mask ? 4 : 3;
  image.rgb.resize(channels * pixels);
  if ((mask ? WebPDecodeRGBAInto : WebPDecodeRGBInto)(bytes, file.size(), image.rgb.data(), image.rgb.size(),
                                                      static_cast<int>(channels * width)) == nullptr)
    return damaged("WebP", "it is truncated, or its pixels cannot be read");
  for (std::size_t i = 0; mask && i < pixels; ++i)
    std::fill_n(&image.rgb[3 * i], 3, static_cast<std::uint8_t>(255 - image.rgb[4 * i + 3]));
  image.rgb.resize(3 * pixels);
  return image;
}

}  // namespace ditfleet::media
