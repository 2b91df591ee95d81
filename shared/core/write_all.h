// write(2) to the end.
#pragma once

#include <string_view>

namespace ditfleet {

// Writes all of it, also where signals interrupt or a write takes only a part. False: it failed, and errno says why.
// Blocks.
bool write_all(int fd, std::string_view bytes);

}  // namespace ditfleet
