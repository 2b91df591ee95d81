#include <algorithm>
#include <utility>

#include "shared/media/formats.h"
#include "shared/media/jpeg_failure.h"
// After jpeglib.h.
#include <jerror.h>

namespace ditfleet::media {
namespace {

// A progressive file may have any number of scans of a few bytes, each as costly as the whole image. Encoders write 10
// to 20 of them.
constexpr std::int64_t kMostScans = 100, kMostScannedPixels = 16 * kMaxWholePixels;
constexpr std::int64_t kMostProgressive = 2 * kMaxWholePixels;  // pixels; libjpeg keeps their coefficients
constexpr unsigned kExifMarker = JPEG_APP0 + 1;

// Warnings of missing data are errors, as in PIL. Level -1: a warning.
void on_message(j_common_ptr info, int level) {
  if (level == -1 && (info->err->msg_code == JWRN_JPEG_EOF || info->err->msg_code == JWRN_HIT_MARKER))
    JpegFailure::fail(info);
}

void on_progress(j_common_ptr info) {
  auto* jpeg = reinterpret_cast<j_decompress_ptr>(info);
  const std::int64_t pixels = std::int64_t{jpeg->image_width} * jpeg->image_height;
  const auto most = std::min(kMostScans, kMostScannedPixels / pixels);
  if (jpeg->input_scan_number <= most) return;
  auto* failure = reinterpret_cast<JpegFailure*>(info->err);
  std::snprintf(failure->message, sizeof failure->message, "it has more than %d scans", static_cast<int>(most));
  std::longjmp(failure->leave, 1);
}

// Adobe's programs store inks inverted, and Pillow takes every file as theirs. Rounds as Pillow.
void to_rgb(const std::vector<JSAMPLE>& inks, JSAMPLE* rgb) {
  for (std::size_t i = 0; i < inks.size(); i += 4, rgb += 3) {
    const int key = inks[i + 3];
    for (std::size_t c = 0; c < 3; ++c) {
      const int product = (255 - inks[i + c]) * key + 128;
      rgb[c] = static_cast<JSAMPLE>(std::clamp(key - (((product >> 8) + product) >> 8), 0, 255));
    }
  }
}

// libjpeg leaves by longjmp, so nothing in here may have a destructor.
bool read(jpeg_decompress_struct& jpeg, jpeg_progress_mgr& progress, std::string_view file, const Header& header,
          JpegFailure& failure, std::vector<JSAMPLE>& inks, Media& image) {
  if (setjmp(failure.leave) != 0) return false;
  jpeg_create_decompress(&jpeg);
  jpeg.progress = &progress;
  jpeg_mem_src(&jpeg, reinterpret_cast<const unsigned char*>(file.data()), file.size());
  jpeg_read_header(&jpeg, TRUE);
  if (jpeg.image_width != header.width || jpeg.image_height != header.height) {
    std::snprintf(failure.message, sizeof failure.message, "it has two sizes");
    return false;
  }
  const bool cmyk = jpeg.num_components == 4;
  jpeg.out_color_space = cmyk ? JCS_CMYK : JCS_RGB;
  if (is_halved(header)) jpeg.scale_num = 1, jpeg.scale_denom = 2;
  jpeg_start_decompress(&jpeg);
  image.width = static_cast<int>(jpeg.output_width);
  image.height = static_cast<int>(jpeg.output_height);
  image.rgb.resize(std::size_t{3} * jpeg.output_width * jpeg.output_height);
  inks.resize(cmyk ? std::size_t{4} * jpeg.output_width : 0);
  while (jpeg.output_scanline < jpeg.output_height) {
    JSAMPLE* rgb = image.rgb.data() + std::size_t{3} * jpeg.output_scanline * jpeg.output_width;
    JSAMPLE* row = cmyk ? inks.data() : rgb;
    jpeg_read_scanlines(&jpeg, &row, 1);
    if (cmyk) to_rgb(inks, rgb);
  }
  jpeg_finish_decompress(&jpeg);
  return true;
}

// A start of frame: baseline, extended or progressive, with Huffman's or arithmetic coding.
bool is_supported_frame(unsigned marker) {
  return (marker >= 0xc0 && marker <= 0xc2) || marker == 0xc9 || marker == 0xca;
}
bool is_frame(unsigned marker) {
  return marker >= 0xc0 && marker <= 0xcf && marker != 0xc4 && marker != 0xc8 && marker != 0xcc;
}

}  // namespace

Result<Header> jpeg_header(std::string_view file) {
  const Error truncated = damaged("JPEG", "the file is truncated");
  Header header;
  bool frame = false;
  std::size_t at = 2;
  for (int segments = 0; segments < kMostChunks; ++segments) {
    // As libjpeg does, skips what is not a marker. A marker may have any number of 0xff before it.
    at = std::min(file.find('\xff', at), file.size());
    at = std::min(file.find_first_not_of('\xff', at), file.size());
    if (file.size() - at < 3) return truncated;
    const unsigned marker = big_endian(file, at++, 1);
    if (marker <= 0x01 || (marker >= 0xd0 && marker <= 0xd8)) continue;  // no length follows
    const std::size_t length = big_endian(file, at, 2);
    if (marker == 0xd9) return damaged("JPEG", "it has no pixels");
    if (length < 2) return damaged("JPEG", "a segment has a wrong length");
    if (file.size() - at < length) return truncated;
    const std::string_view data = file.substr(at + 2, length - 2);
    if (marker == 0xda) {  // the pixels begin
      if (!frame) return damaged("JPEG", "its size is missing");
      return header;
    }
    if (marker == kExifMarker && header.exif.empty() && data.starts_with("Exif")) header.exif = data;
    if (is_frame(marker)) {
      if (std::exchange(frame, true) || data.size() < 6) return damaged("JPEG", "its size is damaged");
      header.height = big_endian(data, 1, 2);
      header.width = big_endian(data, 3, 2);
      const unsigned bits = big_endian(data, 0, 1), colors = big_endian(data, 5, 1);
      if (!is_supported_frame(marker) || bits != 8 || (colors != 1 && colors != 3 && colors != 4))
        return damaged("JPEG", "it is not baseline or progressive with 8 bits in gray, color or CMYK");
      header.most_pixels = marker == 0xc2 || marker == 0xca ? kMostProgressive : kMaxPixels;
      if (std::max(header.width, header.height) > JPEG_MAX_DIMENSION)
        return damaged("JPEG", "a side is longer than " + std::to_string(JPEG_MAX_DIMENSION) + " pixels");
    }
    at += length;
  }
  return damaged("JPEG", "it has more than " + std::to_string(kMostChunks) + " segments before its pixels");
}

Result<Media> decode_jpeg(std::string_view file, const Header& header, bool) {
  JpegFailure failure;
  jpeg_decompress_struct jpeg = {};
  jpeg_progress_mgr progress = {};
  jpeg.err = failure.install();
  failure.manager.emit_message = on_message;
  progress.progress_monitor = on_progress;
  Media image;
  std::vector<JSAMPLE> inks;
  const bool done = read(jpeg, progress, file, header, failure, inks, image);
  jpeg_destroy_decompress(&jpeg);
  if (!done) return damaged("JPEG", failure.message);
  return image;
}

}  // namespace ditfleet::media
