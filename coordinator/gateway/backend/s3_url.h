// The s3:// URLs of images that jobs name.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "shared/core/result.h"

namespace ditfleet::gateway {

// The bucket and the key of "s3://bucket/key", if it is below one of the places in `allowed`, which are separated by
// commas (results.s3.inputs). kInvalidArgument otherwise. Pure, thread-safe.
Result<std::pair<std::string, std::string>> s3_object(std::string_view url, std::string_view allowed);

}  // namespace ditfleet::gateway
