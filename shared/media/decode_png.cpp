#include <png.h>
#include <zlib.h>

#include <csetjmp>
#include <cstring>

#include "shared/media/formats.h"

namespace ditfleet::media {
namespace {

constexpr std::size_t kChunkBytes = 12;  // of a chunk without data: length, type, checksum

struct Reading {
  std::string_view rest;
  Media image;
  std::vector<png_bytep> rows;
  std::vector<png_byte> line;  // two rows of a picture that is halved
  std::string error;
};

void read_bytes(png_structp png, png_bytep to, std::size_t count) {
  auto& rest = static_cast<Reading*>(png_get_io_ptr(png))->rest;
  if (rest.size() < count) png_error(png, "the file is truncated");
  std::memcpy(to, rest.data(), count);
  rest.remove_prefix(count);
}

[[noreturn]] void fail(png_structp png, png_const_charp message) {
  static_cast<Reading*>(png_get_error_ptr(png))->error = message;
  png_longjmp(png, 1);
}

void ignore(png_structp, png_const_charp) {}

// Puts 255 − alpha into the place of the colors.
void to_mask(png_structp, png_row_infop row, png_bytep pixels) {
  for (std::size_t i = 0; i < row->width; ++i) std::memset(pixels + 3 * i, 255 - pixels[4 * i + 3], 3);
}

// Averages squares of four pixels, at odd ends of two or one. libpng leaves by longjmp: see read().
void read_halved(png_structp png, const Header& header, Reading& reading) {
  const auto width = static_cast<std::size_t>(header.width), out = static_cast<std::size_t>(halved(header.width));
  reading.image.width = static_cast<int>(out);
  reading.image.height = static_cast<int>(halved(header.height));
  reading.image.rgb.resize(3 * out * static_cast<std::size_t>(reading.image.height));
  reading.line.resize(2 * 3 * width);
  std::uint8_t* to = reading.image.rgb.data();
  for (std::int64_t y = 0; y < header.height; y += 2) {
    png_bytep first = reading.line.data(), second = first + 3 * width;
    png_read_row(png, first, nullptr);
    if (y + 1 < header.height)
      png_read_row(png, second, nullptr);
    else
      second = first;
    for (std::size_t x = 0; x < width; x += 2)
      for (std::size_t c = 0; c < 3; ++c) {
        const std::size_t left = 3 * x + c, right = x + 1 < width ? left + 3 : left;
        *to++ = static_cast<std::uint8_t>((first[left] + first[right] + second[left] + second[right] + 2) / 4);
      }
  }
}

// libpng leaves by longjmp, so nothing in here may have a destructor.
bool read(png_structp png, png_infop info, const Header& header, bool mask, Reading& reading) {
  if (setjmp(png_jmpbuf(png)) != 0) return false;
  png_set_read_fn(png, &reading, read_bytes);
  // Skips all ancillary chunks but tRNS. libpng would inflate zTXt, iTXt and iCCP to 8 MB each.
  png_set_keep_unknown_chunks(png, PNG_HANDLE_CHUNK_NEVER, nullptr, -1);
  png_set_user_limits(png, static_cast<png_uint_32>(kMaxPixels), static_cast<png_uint_32>(kMaxPixels));
  png_read_info(png, info);
  const png_uint_32 width = png_get_image_width(png, info), height = png_get_image_height(png, info);
  if (width != header.width || height != header.height) png_error(png, "it has two sizes");
  png_set_strip_16(png);
  if (png_get_color_type(png, info) == PNG_COLOR_TYPE_PALETTE)
    png_set_palette_to_rgb(png);
  else if (png_get_bit_depth(png, info) < 8)
    png_set_expand_gray_1_2_4_to_8(png);
  png_set_gray_to_rgb(png);
  if (mask) {
    png_set_tRNS_to_alpha(png);
    png_set_add_alpha(png, 255, PNG_FILLER_AFTER);  // if libpng refuses the tRNS chunk
    png_set_read_user_transform_fn(png, to_mask);
    png_set_user_transform_info(png, nullptr, 8, 3);
  } else {
    png_set_strip_alpha(png);
  }
  png_set_interlace_handling(png);
  png_read_update_info(png, info);
  const std::size_t stride = std::size_t{3} * width;
  if (png_get_rowbytes(png, info) != stride) png_error(png, "unexpected channels");
  if (is_halved(header)) {
    read_halved(png, header, reading);
    png_read_end(png, info);
    return true;
  }
  reading.image.width = static_cast<int>(width);
  reading.image.height = static_cast<int>(height);
  reading.image.rgb.resize(stride * height);
  reading.rows.resize(height);
  for (std::size_t y = 0; y < height; ++y) reading.rows[y] = reading.image.rgb.data() + y * stride;
  png_read_image(png, reading.rows.data());
  png_read_end(png, info);
  return true;
}

// Bits per sample that the color type allows, as a set; 0 for an unknown color type.
unsigned depths_of(unsigned color_type) {
  constexpr unsigned kLow = 1u << 1 | 1u << 2 | 1u << 4, kHigh = 1u << 8 | 1u << 16;
  switch (color_type) {
    case PNG_COLOR_TYPE_GRAY: return kLow | kHigh;
    case PNG_COLOR_TYPE_PALETTE: return kLow | 1u << 8;
    case PNG_COLOR_TYPE_RGB:
    case PNG_COLOR_TYPE_GRAY_ALPHA:
    case PNG_COLOR_TYPE_RGB_ALPHA: return kHigh;
    default: return 0;
  }
}

}  // namespace

Result<Header> png_header(std::string_view file) {
  Header header;
  bool palette = false, pixels = false;
  std::size_t at = 8;
  for (int chunks = 0;; ++chunks) {
    if (file.size() - at < kChunkBytes) return damaged("PNG", "the file is truncated");
    if (chunks == kMostChunks) return damaged("PNG", "it has more than " + std::to_string(kMostChunks) + " chunks");
    const std::size_t length = big_endian(file, at, 4);
    const std::string_view type = file.substr(at + 4, 4);
    if (file.size() - at - kChunkBytes < length) return damaged("PNG", "the file is truncated");
    const std::string_view data = file.substr(at + 8, length);
    const auto intact = [&] {
      const auto sum = ::crc32(0, reinterpret_cast<const Bytef*>(type.data()), static_cast<uInt>(4 + length));
      return sum == big_endian(file, at + 8 + length, 4);
    };
    if ((chunks == 0) != (type == "IHDR")) return damaged("PNG", "it must begin with one IHDR chunk");
    if (type == "IHDR") {
      if (length != 13 || !intact()) return damaged("PNG", "its IHDR chunk has a wrong length or checksum");
      header.width = big_endian(data, 0, 4);
      header.height = big_endian(data, 4, 4);
      const unsigned depth = big_endian(data, 8, 1), color_type = big_endian(data, 9, 1);
      palette = color_type == PNG_COLOR_TYPE_PALETTE;
      header.has_alpha = (color_type & PNG_COLOR_MASK_ALPHA) != 0;
      if (depth > 16 || (depths_of(color_type) >> depth & 1) == 0 || big_endian(data, 10, 3) > 1)
        return damaged("PNG", "its bits per sample, color type, compression, filter or interlacing is unknown");
      header.most_pixels = big_endian(data, 12, 1) == 0 ? kMaxPixels : kMaxWholePixels;
    } else if (type == "PLTE") {
      palette = false;
    } else if (type == "IDAT") {
      if (palette) return damaged("PNG", "it has no palette");
      pixels = true;
    } else if (type == "tRNS" && !pixels) {
      header.has_alpha = true;
    } else if (type == "eXIf" && header.exif.empty() && intact()) {
      header.exif = data;
    } else if (type == "IEND") {
      if (!pixels) return damaged("PNG", "it has no pixels");
      return header;
    }
    at += kChunkBytes + length;
  }
}

Result<Media> decode_png(std::string_view file, const Header& header, bool mask) {
  Reading reading{file, {}, {}, {}, {}};
  png_structp png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &reading, fail, ignore);
  if (png == nullptr) return damaged("PNG", "out of memory");
  png_infop info = png_create_info_struct(png);
  const bool done = info != nullptr && read(png, info, header, mask, reading);
  png_destroy_read_struct(&png, &info, nullptr);
  if (!done) return damaged("PNG", reading.error);
  return std::move(reading.image);
}

}  // namespace ditfleet::media
