#include "shared/core/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "shared/core/bytes.h"
#include "shared/core/write_all.h"

namespace ditfleet {
namespace {

Result<void> write_into(const std::string& path, std::string_view bytes) {
  const auto failed = [&](const char* what) {
    return unavailable(std::string("cannot ") + what + " '" + path + "': " + std::strerror(errno));
  };
  const int fd = ::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY);
  if (fd < 0) return failed("open");
  if (!write_all(fd, bytes)) {
    const Error error = failed("write");
    ::close(fd);
    return error;
  }
  ::close(fd);
  return {};
}

}  // namespace

Result<void> write_output_file(const std::string& path, std::string_view bytes) {
  struct stat info = {};
  if (::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode))
    return write_into(path, bytes);
  std::error_code unknown;
  if (!std::filesystem::is_symlink(path, unknown)) return write_file_atomically(path, bytes);
  const auto target = std::filesystem::canonical(path, unknown);
  return write_file_atomically(unknown ? path : target.string(), bytes);  // a link to nowhere gives way
}

}  // namespace ditfleet
