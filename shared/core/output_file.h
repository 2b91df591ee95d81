// A file that a person names for output.
#pragma once

#include <string>
#include <string_view>

#include "shared/core/result.h"

namespace ditfleet {

// A device or a pipe (/dev/null, /dev/stdout) is written to, never replaced, and a link's target takes the bytes; any
// other file as write_file_atomically does, whose errors these are. Blocks.
Result<void> write_output_file(const std::string& path, std::string_view bytes);

}  // namespace ditfleet
