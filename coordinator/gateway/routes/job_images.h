// The images that clients send with a job. Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "shared/core/json.h"
#include "shared/core/result.h"
#include "shared/images/image_file.h"

namespace ditfleet::gateway {

using Images = std::map<std::string, std::string>;  // files by their SHA-256, the value of the job's field

// Checks a file that becomes the value of a field of type kImage. `most`: results.input_max_bytes. `param`: the field
// in errors. kPayloadTooLarge; kInvalidArgument as images::inspect().
Result<images::Info> check_image(std::string_view file, std::int64_t most, const std::string& param = {});

// Replaces the images in base64 and data URLs in a job's JSON by their SHA-256, and returns their files. Other values
// stay; job::parse_spec() checks them. Errors: those of check_image(), kInvalidArgument for a URL and for invalid
// base64.
Result<Images> take_images(json::object& job, std::int64_t most);

}  // namespace ditfleet::gateway
