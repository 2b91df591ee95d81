// Output files named by the user.
#pragma once

#include <string>
#include <string_view>

#include "shared/core/result.h"

namespace ditfleet {

// Writes into a device or a pipe (/dev/null, /dev/stdout) and replaces any other file atomically; a symbolic link
// stays. Errors: those of write_file_atomically(). Blocks.
Result<void> write_output_file(const std::string& path, std::string_view bytes);

}  // namespace ditfleet
