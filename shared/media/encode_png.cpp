#include <png.h>

#include <csetjmp>

#include "shared/media/encoders.h"

namespace ditfleet::media {
namespace {

struct Output {
  std::string bytes;
  std::string failure;
};

void append(png_structp png, png_bytep data, png_size_t size) {
  static_cast<Output*>(png_get_io_ptr(png))->bytes.append(reinterpret_cast<const char*>(data), size);
}

[[noreturn]] void fail(png_structp png, png_const_charp message) {
  static_cast<Output*>(png_get_error_ptr(png))->failure = message;
  std::longjmp(png_jmpbuf(png), 1);
}

void ignore_warning(png_structp, png_const_charp) {}

// libpng leaves by longjmp, so nothing in here may have a destructor. False: output.failure says why.
bool write(png_structp png, png_infop info, const Media& image, Output& output) {
  if (setjmp(png_jmpbuf(png)) != 0) return false;
  png_set_write_fn(png, &output, append, nullptr);
  png_set_IHDR(png, info, static_cast<png_uint_32>(image.width), static_cast<png_uint_32>(image.height), 8,
               PNG_COLOR_TYPE_RGB, PNG_INTERLACE_NONE, PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
  // Level 3 with these two filters: near the size of level 6 for photographs, in a fraction of the time.
  png_set_compression_level(png, 3);
  png_set_filter(png, PNG_FILTER_TYPE_BASE, PNG_FILTER_SUB | PNG_FILTER_UP);
  png_write_info(png, info);
  for (int y = 0; y < image.height; ++y) {
    png_write_row(png, image.rgb.data() + static_cast<std::size_t>(y) * static_cast<std::size_t>(image.width) * 3);
  }
  png_write_end(png, info);
  return true;
}

}  // namespace

Result<std::string> encode_png(const Media& image, int) {
  Output output;
  png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, &output, fail, ignore_warning);
  if (png == nullptr) return Error{Code::kOutOfMemory, "[media] cannot write PNG: the encoder ran out of memory"};
  png_infop info = png_create_info_struct(png);
  const bool done = info != nullptr && write(png, info, image, output);
  png_destroy_write_struct(&png, &info);
  if (!done) return internal_error("[media] cannot write PNG: " + output.failure);
  return std::move(output.bytes);
}

}  // namespace ditfleet::media
