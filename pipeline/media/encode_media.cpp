// encode_media(): what all formats share, and the choice among them.
#include "pipeline/media/encoders.h"

namespace ditfleet::pipeline {

Result<std::string> encode_media(const Media& media, job::OutputFormat format, int quality) {
  constexpr int kLargestSide = 1 << 16, kMostFrames = 1 << 12;  // keeps every product below within 64 bits
  if (media.width <= 0 || media.height <= 0 || media.width > kLargestSide || media.height > kLargestSide) {
    return invalid_argument("[media] the image is " + std::to_string(media.width) + "x" + std::to_string(media.height) +
                            "; both sides must be from 1 to " + std::to_string(kLargestSide));
  }
  if (media.frames < 1 || media.frames > kMostFrames) {
    return invalid_argument("[media] the video has " + std::to_string(media.frames) + " frames; it must have 1 to " +
                            std::to_string(kMostFrames));
  }
  const auto wanted = static_cast<std::size_t>(media.width) * static_cast<std::size_t>(media.height) * 3 *
                      static_cast<std::size_t>(media.frames);
  if (media.rgb.size() != wanted) {
    return invalid_argument("[media] the image has " + std::to_string(media.rgb.size()) + " bytes; " +
                            std::to_string(media.width) + "x" + std::to_string(media.height) + " in RGB needs " +
                            std::to_string(wanted));
  }
  if (format != job::OutputFormat::kPng && (quality < 0 || quality > 100)) {
    return invalid_argument("[media] the quality is " + std::to_string(quality) + "; it must be from 0 to 100",
                            "output_compression");
  }
  if (media.frames > 1 && !job::row_of(format).holds_videos) {
    return invalid_argument("[media] " + std::string(job::row_of(format).name) + " has one frame, but the video has " +
                                std::to_string(media.frames) + "; use mp4 or webp",
                            "output_format");
  }
  switch (format) {
    case job::OutputFormat::kMp4: return BackgroundMp4Writer(quality).finish(media);
    case job::OutputFormat::kPng: return media::encode_png(media);
    case job::OutputFormat::kJpeg: return media::encode_jpeg(media, quality);
    case job::OutputFormat::kWebp:
      return media.frames > 1 ? media::encode_animated_webp(media, quality) : media::encode_webp(media, quality);
  }
  return internal_error("[media] unknown image format");
}

}  // namespace ditfleet::pipeline
