#include <csetjmp>
#include <cstdio>
#include <cstdlib>

// jpeglib.h uses FILE without including it.
#include <jpeglib.h>

#include "pipeline/media/encoders.h"

namespace ditfleet::pipeline::media {
namespace {

struct Failure {
  jpeg_error_mgr manager = {};  // first: libjpeg gives back a pointer to it
  std::jmp_buf leave;
  char message[JMSG_LENGTH_MAX] = {};
};

[[noreturn]] void fail(j_common_ptr info) {
  auto* failure = reinterpret_cast<Failure*>(info->err);
  info->err->format_message(info, failure->message);
  std::longjmp(failure->leave, 1);
}

// libjpeg leaves by longjmp, so nothing in here may have a destructor.
bool write(jpeg_compress_struct& jpeg, const Media& image, int quality, Failure& failure, unsigned char** bytes,
           unsigned long* size) {
  if (setjmp(failure.leave) != 0) return false;
  jpeg_create_compress(&jpeg);
  jpeg_mem_dest(&jpeg, bytes, size);
  jpeg.image_width = static_cast<JDIMENSION>(image.width);
  jpeg.image_height = static_cast<JDIMENSION>(image.height);
  jpeg.input_components = 3;
  jpeg.in_color_space = JCS_RGB;
  jpeg_set_defaults(&jpeg);
  jpeg_set_quality(&jpeg, quality, TRUE);
  jpeg_start_compress(&jpeg, TRUE);
  while (jpeg.next_scanline < jpeg.image_height) {
    // The library reads rows only; its interface predates const.
    auto* row =
        const_cast<JSAMPLE*>(image.rgb.data() + static_cast<std::size_t>(jpeg.next_scanline) * jpeg.image_width * 3);
    jpeg_write_scanlines(&jpeg, &row, 1);
  }
  jpeg_finish_compress(&jpeg);
  return true;
}

}  // namespace

Result<std::string> encode_jpeg(const Media& image, int quality) {
  if (image.width > JPEG_MAX_DIMENSION || image.height > JPEG_MAX_DIMENSION) {
    return invalid_argument("[media] JPEG supports at most " + std::to_string(JPEG_MAX_DIMENSION) + " pixels per side");
  }
  Failure failure;
  jpeg_compress_struct jpeg = {};
  jpeg.err = jpeg_std_error(&failure.manager);
  failure.manager.error_exit = fail;
  unsigned char* bytes = nullptr;
  unsigned long size = 0;
  const bool done = write(jpeg, image, quality, failure, &bytes, &size);
  jpeg_destroy_compress(&jpeg);
  std::string result;
  if (done) result.assign(reinterpret_cast<const char*>(bytes), size);
  std::free(bytes);
  if (!done) return internal_error("[media] cannot write JPEG: " + std::string(failure.message));
  return result;
}

}  // namespace ditfleet::pipeline::media
