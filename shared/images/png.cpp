#include <png.h>

#include <csetjmp>
#include <cstring>

#include "shared/images/formats.h"

namespace ditfleet::images {
namespace {

struct Reading {
  std::string_view rest;
  Picture picture;
  std::vector<png_bytep> rows;
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

void take_exif(png_structp png, png_infop info, Reading& reading) {
  png_bytep bytes = nullptr;
  png_uint_32 count = 0;
  if (png_get_eXIf_1(png, info, &count, &bytes) != 0)
    reading.picture.exif.assign(reinterpret_cast<const char*>(bytes), count);
}

// libpng leaves by longjmp, so nothing in here may have a destructor.
bool read(png_structp png, png_infop info, bool with_pixels, Reading& reading) {
  if (setjmp(png_jmpbuf(png)) != 0) return false;
  png_set_read_fn(png, &reading, read_bytes);
  png_read_info(png, info);
  Image& image = reading.picture.image;
  const png_uint_32 width = png_get_image_width(png, info), height = png_get_image_height(png, info);
  image.width = static_cast<int>(width);
  image.height = static_cast<int>(height);
  take_exif(png, info, reading);
  if (!with_pixels || !check_size(width, height).ok()) return true;
  png_set_strip_16(png);
  if (png_get_color_type(png, info) == PNG_COLOR_TYPE_PALETTE)
    png_set_palette_to_rgb(png);
  else if (png_get_bit_depth(png, info) < 8)
    png_set_expand_gray_1_2_4_to_8(png);
  png_set_gray_to_rgb(png);
  png_set_strip_alpha(png);
  png_set_interlace_handling(png);
  png_read_update_info(png, info);
  const std::size_t stride = std::size_t{3} * width;
  if (png_get_rowbytes(png, info) != stride) png_error(png, "unexpected channels");
  image.rgb.resize(stride * height);
  reading.rows.resize(height);
  for (std::size_t y = 0; y < height; ++y) reading.rows[y] = image.rgb.data() + y * stride;
  png_read_image(png, reading.rows.data());
  png_read_end(png, info);
  take_exif(png, info, reading);
  return true;
}

}  // namespace

Result<Picture> read_png(std::string_view file, bool with_pixels) {
  Reading reading{file, {}, {}, {}};
  png_structp png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &reading, fail, ignore);
  if (png == nullptr) return damaged("PNG", "out of memory");
  png_infop info = png_create_info_struct(png);
  const bool done = info != nullptr && read(png, info, with_pixels, reading);
  png_destroy_read_struct(&png, &info, nullptr);
  if (!done) return damaged("PNG", reading.error);
  if (auto good = check_size(reading.picture.image.width, reading.picture.image.height); !good) return good.error();
  return std::move(reading.picture);
}

}  // namespace ditfleet::images
