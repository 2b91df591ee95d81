#include "shared/media/image_file.h"

#include <algorithm>
#include <utility>

#include "shared/media/formats.h"

namespace ditfleet::media {
namespace {

struct Format {
  std::string_view media_type;
  Result<Header> (*header)(std::string_view file);
  Result<Media> (*pixels)(std::string_view file, const Header& header, bool mask);
};

const Format* format_of(std::string_view file) {
  static constexpr Format kPng{"image/png", png_header, decode_png}, kJpeg{"image/jpeg", jpeg_header, decode_jpeg},
      kWebp{"image/webp", webp_header, decode_webp}, kBmp{"image/bmp", bmp_header, decode_bmp},
      kGif{"image/gif", gif_header, decode_gif};
  if (file.starts_with("\x89PNG\r\n\x1a\n")) return &kPng;
  if (file.starts_with("\xff\xd8\xff")) return &kJpeg;
  if (file.size() >= 12 && file.starts_with("RIFF") && file.substr(8, 4) == "WEBP") return &kWebp;
  if (file.starts_with("GIF87a") || file.starts_with("GIF89a")) return &kGif;
  if (file.starts_with("BM")) return &kBmp;
  return nullptr;
}

Error not_an_image(std::string_view file) {
  if (file.empty()) return invalid_argument("the image is empty; send a PNG, JPEG, WebP, BMP or GIF file");
  const bool heif = file.size() >= 12 && file.substr(4, 4) == "ftyp";
  return invalid_argument(std::string("the image is not a PNG, JPEG, WebP, BMP or GIF file") +
                          (heif ? "; it seems to be HEIC or AVIF: convert it first"
                           : file.starts_with("version https://git-lfs")
                               ? "; it is a Git LFS pointer: `git lfs pull` fetches the file"
                               : ""));
}

// The EXIF tag Orientation, 1 to 8; 1 if it is missing or the structure is damaged.
int orientation_of(std::string_view tiff) {
  if (tiff.starts_with(std::string_view("Exif\0\0", 6))) tiff.remove_prefix(6);
  const bool little = tiff.starts_with("II");
  if (!little && !tiff.starts_with("MM")) return 1;
  // Big enough a value to be outside for missing bytes.
  const auto number = [&](std::size_t at, std::size_t bytes) {
    std::size_t value = 0;
    if (at > tiff.size() || tiff.size() - at < bytes) return tiff.size();
    for (std::size_t i = 0; i < bytes; ++i)
      value = value << 8 | static_cast<unsigned char>(tiff[at + (little ? bytes - 1 - i : i)]);
    return value;
  };
  constexpr std::size_t kOrientation = 0x0112, kShort = 3, kEntryBytes = 12;
  const std::size_t directory = number(4, 4);
  if (directory >= tiff.size()) return 1;
  const std::size_t count = std::min(number(directory, 2), tiff.size() / kEntryBytes);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t entry = directory + 2 + i * kEntryBytes;
    if (number(entry, 2) != kOrientation || number(entry + 2, 2) != kShort) continue;
    const std::size_t value = number(entry + 8, 2);
    return value >= 1 && value <= 8 ? static_cast<int>(value) : 1;
  }
  return 1;
}

Media upright(Media image, int orientation) {
  if (orientation == 1) return image;
  const bool swap = orientation >= 5;
  const bool flip_x = orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;
  const bool flip_y = orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
  Media out{.width = image.width, .height = image.height};
  if (swap) std::swap(out.width, out.height);
  out.rgb.reserve(image.rgb.size());
  for (int y = 0; !image.rgb.empty() && y < out.height; ++y) {
    for (int x = 0; x < out.width; ++x) {
      const int column = swap ? y : x, row = swap ? x : y;
      const auto from_x = static_cast<std::size_t>(flip_x ? image.width - 1 - column : column);
      const auto from_y = static_cast<std::size_t>(flip_y ? image.height - 1 - row : row);
      const auto* pixel = &image.rgb[(from_y * static_cast<std::size_t>(image.width) + from_x) * 3];
      out.rgb.insert(out.rgb.end(), pixel, pixel + 3);
    }
  }
  return out;
}

Result<Header> read_header(const Format* format, std::string_view file) {
  if (!format) return not_an_image(file);
  auto header = format->header(file);
  if (!header) return header;
  const auto [width, height, exif, most, alpha] = *header;
  if (width > 0 && height > 0 && width <= most && height <= most && width * height <= most) return header;
  return invalid_argument("the image is " + std::to_string(width) + "x" + std::to_string(height) +
                          "; a file of its kind must have 1 to " + std::to_string(most) +
                          " pixels; send a smaller picture");
}

Result<Media> decode(std::string_view file, bool mask) {
  const Format* format = format_of(file);
  const auto header = read_header(format, file);
  if (!header) return header.error();
  auto image = format->pixels(file, *header, mask && header->has_alpha);
  if (!image) return image;
  return upright(std::move(*image), orientation_of(header->exif));
}

}  // namespace

Error damaged(std::string_view format, std::string_view why) {
  return invalid_argument("the image is a damaged or unsupported " + std::string(format) +
                          " file: " + std::string(why));
}

Result<Info> inspect(std::string_view file) {
  const Format* format = format_of(file);
  const auto header = read_header(format, file);
  if (!header) return header.error();
  const Media image = upright({.width = static_cast<int>(header->width), .height = static_cast<int>(header->height)},
                              orientation_of(header->exif));
  return Info{format->media_type, image.width, image.height, header->has_alpha};
}

Result<Media> decode(std::string_view file) { return decode(file, false); }
Result<Media> decode_mask(std::string_view file) {
  auto mask = decode(file, true);
  const bool opaque = mask && std::all_of(mask->rgb.begin(), mask->rgb.end(), [](auto value) { return value == 0; });
  return opaque ? decode(file, false) : std::move(mask);
}

}  // namespace ditfleet::media
