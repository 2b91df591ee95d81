// What a model generates: an image or a video.
#pragma once

#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "shared/core/result.h"
#include "shared/job/output_format.h"

namespace ditfleet::pipeline {

// Frames in order; an image has one. A frame is width · height · 3 bytes: interleaved RGB, 8 bits, rows from the top.
struct Media {
  int width = 0, height = 0, frames = 1;
  double frame_rate = 0;  // frames per second; 0 for an image
  std::vector<std::uint8_t> rgb;
};

// Encodes media as a file. `quality`: 0 to 100; PNG ignores it. Several frames need MP4 or WebP.
// Errors: kInvalidArgument (bad sizes, a quality out of range, several frames as PNG or JPEG), those of Mp4Writer.
// Thread-safe.
Result<std::string> encode_media(const Media& media, job::OutputFormat format, int quality);

// Encodes a video as MP4 (H.264, 4:2:0, bt709) while its frames are still being decoded. The index precedes the frames,
// so that players start before they have the whole file. The same frames give the same bytes. Not thread-safe; two
// writers are independent.
class Mp4Writer {
 public:
  // `frame_rate`: frames per second; 16 if it is 0. `quality`: 0 to 100.
  // Errors: kInvalidArgument (an odd side, a side or rate out of range), kUnavailable (no H.264 encoder).
  static Result<Mp4Writer> open(int width, int height, double frame_rate, int quality);
  Mp4Writer(Mp4Writer&&) noexcept;
  Mp4Writer& operator=(Mp4Writer&&) noexcept;
  ~Mp4Writer();

  // Encodes the next frame: width · height · 3 bytes as in Media. Returns before the encoder's threads are done with
  // it, but `rgb` is free. kInvalidArgument: wrong number of bytes.
  Result<void> add(std::span<const std::uint8_t> rgb);
  // Returns the file. Call it once, after the last frame. kInvalidArgument: no frame was added.
  Result<std::string> finish();

 private:
  struct Impl;
  explicit Mp4Writer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Writes a video as MP4 on a thread of its own while its frames are still being decoded. The file is the one that
// encode_media() returns. The destructor waits for the frames that were added. Not thread-safe.
class BackgroundMp4Writer {
 public:
  explicit BackgroundMp4Writer(int quality) : quality_(quality) {}

  // Copies the frames of `so_far` that no call before has added. Returns before they are encoded.
  void add(const Media& so_far);
  // Encodes what is left of `video` and returns the file. Call it once. Errors: those of Mp4Writer.
  Result<std::string> finish(const Media& video);

 private:
  Result<void> write(const Media& so_far, std::span<const std::uint8_t> rgb);  // whole frames

  const int quality_;
  std::size_t added_ = 0;              // bytes
  std::optional<Mp4Writer> writer_;    // used by one task at a time
  std::future<Result<void>> written_;  // of the frames that were added; each task waits for the one before
};

}  // namespace ditfleet::pipeline
