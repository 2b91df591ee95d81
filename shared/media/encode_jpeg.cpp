#include <cstdlib>

#include "shared/media/encoders.h"
#include "shared/media/jpeg_failure.h"

namespace ditfleet::media {
namespace {

// libjpeg leaves by longjmp, so nothing in here may have a destructor.
bool write(jpeg_compress_struct& jpeg, const Media& image, int quality, JpegFailure& failure, unsigned char** bytes,
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
  JpegFailure failure;
  jpeg_compress_struct jpeg = {};
  jpeg.err = failure.install();
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

}  // namespace ditfleet::media
