#include "shared/media/writer.h"

#include <algorithm>
#include <array>
#include <future>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

#include "shared/media/encoders.h"
#include "shared/media/mp4.h"

namespace ditfleet::media {
namespace {

// What all formats require.
Result<void> check(const Media& media, job::OutputFormat format, int quality) {
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
  return {};
}

// Of a format that needs all frames at once.
template <auto encode_whole>
class WholeWriter final : public MediaWriter {
 public:
  WholeWriter(job::OutputFormat format, int quality) : format_(format), quality_(quality) {}
  void add(const Media&) override {}
  Result<std::string> finish(const Media& media, const std::string& comment) override {
    if (auto checked = check(media, format_, quality_); !checked) return checked.error();
    if constexpr (std::is_invocable_v<decltype(encode_whole), const Media&, const std::string&>)
      return encode_whole(media, comment);
    else
      return encode_whole(media, quality_);
  }

 private:
  const job::OutputFormat format_;
  const int quality_;
};

// Encodes frames on a thread of its own while the next ones are being decoded.
class Mp4InBackground final : public MediaWriter {
 public:
  Mp4InBackground(job::OutputFormat format, int quality) : format_(format), quality_(quality) {}

  void add(const Media& so_far) override {
    Media part{so_far.width, so_far.height, so_far.frames, so_far.frame_rate, {}};
    part.rgb.assign(so_far.rgb.begin() + static_cast<std::ptrdiff_t>(std::min(added_, so_far.rgb.size())),
                    so_far.rgb.end());
    added_ += part.rgb.size();
    const auto task = [this](std::future<Result<void>> before, const Media& frames) -> Result<void> {
      if (before.valid()) {
        if (auto written = before.get(); !written) return written;
      }
      return write(frames, frames.rgb);
    };
    written_ = std::async(std::launch::async, task, std::move(written_), std::move(part));
  }

  Result<std::string> finish(const Media& video, const std::string& comment) override {
    if (written_.valid()) {
      if (auto written = written_.get(); !written) return written.error();
    }
    if (auto checked = check(video, format_, quality_); !checked) return checked.error();
    const auto rest = std::span(video.rgb).subspan(std::min(added_, video.rgb.size()));
    if (auto written = write(video, rest); !written) return written.error();
    return writer_->finish(comment);
  }

 private:
  // `rgb`: whole frames.
  Result<void> write(const Media& so_far, std::span<const std::uint8_t> rgb) {
    if (!writer_) {
      auto opened = Mp4Writer::open(so_far.width, so_far.height, so_far.frame_rate, quality_);
      if (!opened) return opened.error();
      writer_ = std::move(*opened);
    }
    const auto frame_bytes = static_cast<std::size_t>(so_far.width) * static_cast<std::size_t>(so_far.height) * 3;
    for (std::size_t at = 0; at < rgb.size(); at += frame_bytes) {
      if (auto added = writer_->add(rgb.subspan(at, std::min(frame_bytes, rgb.size() - at))); !added) return added;
    }
    return {};
  }

  const job::OutputFormat format_;
  const int quality_;
  std::size_t added_ = 0;              // bytes
  std::optional<Mp4Writer> writer_;    // used by one task at a time
  std::future<Result<void>> written_;  // of the frames that were added; each task waits for the one before
};

template <class Writer>
std::unique_ptr<MediaWriter> make(job::OutputFormat format, int quality) {
  return std::make_unique<Writer>(format, quality);
}

// In the order of job::kOutputFormats.
constexpr std::array kWriters = {make<WholeWriter<encode_png>>, make<WholeWriter<encode_jpeg>>,
                                 make<WholeWriter<encode_webp>>, make<Mp4InBackground>};
static_assert(kWriters.size() == job::kOutputFormats.size());

}  // namespace

std::unique_ptr<MediaWriter> open_writer(job::OutputFormat format, int quality) {
  return kWriters[static_cast<std::size_t>(format)](format, quality);
}

Result<std::string> encode(const Media& media, job::OutputFormat format, int quality) {
  return open_writer(format, quality)->finish(media, "");
}

}  // namespace ditfleet::media
