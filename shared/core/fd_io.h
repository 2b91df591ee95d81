// read(2) and write(2) to the end, also after interruptions and partial transfers. Errors are in errno. Blocks.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace ditfleet {

// Reads up to `max` bytes; fewer only at the end. Nothing: it failed.
std::optional<std::string> read_up_to(int fd, std::size_t max);

// False: it failed.
bool write_all(int fd, std::string_view bytes);

}  // namespace ditfleet
