#include "shared/core/fd_io.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace ditfleet {

std::optional<std::string> read_up_to(int fd, std::size_t max) {
  std::string bytes(max, '\0');
  std::size_t size = 0;
  while (size < max) {
    const ssize_t n = ::read(fd, bytes.data() + size, max - size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return std::nullopt;
    if (n == 0) break;
    size += static_cast<std::size_t>(n);
  }
  bytes.resize(size);
  return bytes;
}

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = ENOSPC;
    if (n <= 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(n));
  }
  return true;
}

Error cannot_read(const std::string& path) {
  const int e = errno;
  return Error{e == ENOENT ? Code::kNotFound : Code::kUnavailable, "cannot read '" + path + "': " + std::strerror(e)};
}

}  // namespace ditfleet
