// encode_image of pipeline/engine.h: what every format shares, and the choice among them.
#include "pipeline/media/encoders.h"

namespace ditfleet::pipeline {

Result<std::string> encode_image(const Image& image, ImageFormat format, int quality) {
  constexpr int kLargestSide = 1 << 16;  // keeps every product below within 64 bits
  if (image.width <= 0 || image.height <= 0 || image.width > kLargestSide || image.height > kLargestSide) {
    return invalid_argument("[media] the image is " + std::to_string(image.width) + "x" + std::to_string(image.height) +
                            "; both sides must be from 1 to " + std::to_string(kLargestSide));
  }
  const auto wanted = static_cast<std::size_t>(image.width) * static_cast<std::size_t>(image.height) * 3;
  if (image.rgb.size() != wanted) {
    return invalid_argument("[media] the image has " + std::to_string(image.rgb.size()) + " bytes; " +
                            std::to_string(image.width) + "x" + std::to_string(image.height) + " in RGB takes " +
                            std::to_string(wanted));
  }
  if (format != ImageFormat::kPng && (quality < 0 || quality > 100)) {
    return invalid_argument("[media] the quality is " + std::to_string(quality) + "; it must be from 0 to 100",
                            "output_compression");
  }
  switch (format) {
    case ImageFormat::kPng: return media::encode_png(image);
    case ImageFormat::kJpeg: return media::encode_jpeg(image, quality);
    case ImageFormat::kWebp: return media::encode_webp(image, quality);
  }
  return internal_error("[media] unknown image format");
}

}  // namespace ditfleet::pipeline
