// Writes output files whose paths come from the user.
#pragma once

#include <string>
#include <string_view>

#include "shared/core/result.h"

namespace ditfleet {

// Writes directly into a device or a pipe, such as /dev/stdout. Replaces any other file atomically; if the path is a
// symbolic link, replaces its target. `keep_mode` and errors: as in write_file_atomically(). Blocks.
Result<void> write_output_file(const std::string& path, std::string_view bytes, bool keep_mode = false);

}  // namespace ditfleet
