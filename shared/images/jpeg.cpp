#include <csetjmp>
#include <cstdio>
#include <cstdlib>

// jpeglib.h uses FILE without including it.
#include <jerror.h>
#include <jpeglib.h>

#include "shared/images/formats.h"

namespace ditfleet::images {
namespace {

constexpr int kMostScans = 100;  // a progressive file may have any number, each as costly as the whole image
constexpr int kExifMarker = JPEG_APP0 + 1;

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

// Warnings of missing data are errors, as in PIL. Level -1: a warning.
void on_message(j_common_ptr info, int level) {
  if (level == -1 && (info->err->msg_code == JWRN_JPEG_EOF || info->err->msg_code == JWRN_HIT_MARKER)) fail(info);
}

void on_progress(j_common_ptr info) {
  if (reinterpret_cast<j_decompress_ptr>(info)->input_scan_number <= kMostScans) return;
  auto* failure = reinterpret_cast<Failure*>(info->err);
  std::snprintf(failure->message, sizeof failure->message, "it has more than %d scans", kMostScans);
  std::longjmp(failure->leave, 1);
}

// libjpeg leaves by longjmp, so nothing in here may have a destructor.
bool read(jpeg_decompress_struct& jpeg, jpeg_progress_mgr& progress, std::string_view file, bool with_pixels,
          Failure& failure, Picture& picture) {
  if (setjmp(failure.leave) != 0) return false;
  jpeg_create_decompress(&jpeg);
  jpeg.progress = &progress;
  jpeg_mem_src(&jpeg, reinterpret_cast<const unsigned char*>(file.data()), file.size());
  jpeg_save_markers(&jpeg, kExifMarker, 0xffff);
  jpeg_read_header(&jpeg, TRUE);
  Image& image = picture.image;
  image.width = static_cast<int>(jpeg.image_width);
  image.height = static_cast<int>(jpeg.image_height);
  for (auto* marker = jpeg.marker_list; marker != nullptr; marker = marker->next) {
    const std::string_view data(reinterpret_cast<const char*>(marker->data), marker->data_length);
    if (marker->marker != kExifMarker || !data.starts_with("Exif")) continue;
    picture.exif = data;
    break;
  }
  if (jpeg.num_components == 4) {
    std::snprintf(failure.message, sizeof failure.message, "it is in CMYK; convert it to RGB");
    return false;
  }
  if (!with_pixels || !check_size(image.width, image.height).ok()) return true;
  jpeg.out_color_space = JCS_RGB;
  jpeg_start_decompress(&jpeg);
  image.rgb.resize(std::size_t{3} * jpeg.output_width * jpeg.output_height);
  while (jpeg.output_scanline < jpeg.output_height) {
    JSAMPLE* row = image.rgb.data() + std::size_t{3} * jpeg.output_scanline * jpeg.output_width;
    jpeg_read_scanlines(&jpeg, &row, 1);
  }
  jpeg_finish_decompress(&jpeg);
  return true;
}

}  // namespace

Result<Picture> read_jpeg(std::string_view file, bool with_pixels) {
  Failure failure;
  jpeg_decompress_struct jpeg = {};
  jpeg_progress_mgr progress = {};
  jpeg.err = jpeg_std_error(&failure.manager);
  failure.manager.error_exit = fail;
  failure.manager.emit_message = on_message;
  progress.progress_monitor = on_progress;
  Picture picture;
  const bool done = read(jpeg, progress, file, with_pixels, failure, picture);
  jpeg_destroy_decompress(&jpeg);
  if (!done) return damaged("JPEG", failure.message);
  if (auto good = check_size(picture.image.width, picture.image.height); !good) return good.error();
  return picture;
}

}  // namespace ditfleet::images
