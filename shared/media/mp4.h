// Encodes a video as MP4, frame by frame.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "shared/core/result.h"

namespace ditfleet::media {

// H.264, 4:2:0, bt709. The index precedes the frames, so that players start before they have the whole file. The same
// frames give the same bytes. Not thread-safe; two writers are independent.
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
  // Returns the file, with a comment unless it is empty. Call it once, after the last frame. kInvalidArgument: no frame
  // was added.
  Result<std::string> finish(const std::string& comment);

 private:
  struct Impl;
  explicit Mp4Writer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ditfleet::media
