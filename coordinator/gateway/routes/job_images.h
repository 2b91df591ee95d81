// The images that clients send with a job. Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "shared/core/json.h"
#include "shared/core/result.h"
#include "shared/job/fields.h"
#include "shared/media/image_file.h"

namespace ditfleet::gateway {

using Images = std::map<std::string, std::string>;  // files by their SHA-256, the value of the job's field

// An image as a request has it: the file, base64 or a data URL with the file in it, or the id of a stored one.
struct SentImage {
  enum class Form { kFile, kText, kStored };
  job::Field field;       // "image" or "mask"
  std::size_t index = 0;  // among the field's images
  std::string param;      // what the client calls it, as "images[1]"
  std::string contents = {};
  Form form = Form::kFile;
};
using SentImages = std::vector<SentImage>;

// Takes the images out of a job's JSON, without looking at them. Each that is not stored yet leaves the SHA-256
// kUnknownSha256, so that the job can be checked before its images are decoded. Other values stay; job::parse_spec()
// checks them.
inline constexpr std::string_view kUnknownSha256 = "0000000000000000000000000000000000000000000000000000000000000000";
SentImages take_images(json::object& job);

struct ImageFile {
  std::string sha256, bytes;
  media::Info info;
};

// Decodes and checks an image, which is not kStored. Takes up to 100 ms for 20 MiB. `most`: results.input_max_bytes.
// With its param: kPayloadTooLarge; kInvalidArgument as media::inspect(), for a URL and for invalid base64.
Result<ImageFile> read_image(SentImage image, std::int64_t most);

}  // namespace ditfleet::gateway
