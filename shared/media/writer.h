// Writes media as files.
#pragma once

#include <memory>
#include <string>

#include "shared/core/result.h"
#include "shared/job/output_format.h"
#include "shared/media/media.h"

namespace ditfleet::media {

// Writes one file. The same media gives the same bytes, however its frames were added. The destructor waits for the
// frames that were added. Not thread-safe; two writers are independent.
class MediaWriter {
 public:
  virtual ~MediaWriter() = default;
  // Copies the frames of `so_far` that no call before has added, and returns before they are encoded. Formats that
  // need all frames at once ignore the call.
  virtual void add(const Media& so_far) = 0;
  // Encodes what is left of `media` and returns the file. `comment`: ASCII that PNG (tEXt) and MP4 files carry; empty:
  // none. Call it once. Blocks. kInvalidArgument: bad sizes, a quality
  // out of range, several frames as PNG or JPEG, an odd side or a rate out of range as MP4. kUnavailable: no encoder
  // for H.264.
  virtual Result<std::string> finish(const Media& media, const std::string& comment) = 0;
};

// `quality`: 0 to 100; PNG ignores it. Takes no time: what is wrong is an error of finish(). Thread-safe.
std::unique_ptr<MediaWriter> open_writer(job::OutputFormat format, int quality);

// Encodes whole media. Errors: those of finish(). Thread-safe.
Result<std::string> encode(const Media& media, job::OutputFormat format, int quality);

}  // namespace ditfleet::media
