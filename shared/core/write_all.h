// write(2) to the end.
#pragma once

#include <string_view>

namespace ditfleet {

// Writes all bytes, also after interruptions and partial writes. False: it failed; errno has the reason. Blocks.
bool write_all(int fd, std::string_view bytes);

}  // namespace ditfleet
