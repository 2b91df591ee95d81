// Complete read(2) and write(2), despite interruptions and partial transfers. Errors are in errno. Blocks.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "shared/core/error.h"

namespace ditfleet {

// Reads up to `max` bytes; fewer only at the end of the file. Returns nothing after an error.
std::optional<std::string> read_up_to(int fd, std::size_t max);

// Returns false after an error.
bool write_all(int fd, std::string_view bytes);

// The error of a failed open() or read(), by errno: kNotFound if there is no such file, else kUnavailable.
Error cannot_read(const std::string& path);

}  // namespace ditfleet
