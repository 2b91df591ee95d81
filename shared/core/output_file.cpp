#include "shared/core/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "shared/core/bytes.h"
#include "shared/core/fd_io.h"
#include "shared/core/unique_fd.h"

namespace ditfleet {
namespace {

Result<void> write_into(const std::string& path, std::string_view bytes) {
  const auto failed = [&](const char* what) {
    return unavailable(std::string("cannot ") + what + " '" + path + "': " + std::strerror(errno));
  };
  const UniqueFd file(::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY));
  if (!file.valid()) return failed("open");
  return write_all(file.get(), bytes) ? Result<void>() : failed("write");
}

}  // namespace

Result<void> write_output_file(const std::string& path, std::string_view bytes, bool keep_mode) {
  struct stat info = {};
  if (::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode))
    return write_into(path, bytes);
  std::error_code unknown;
  if (!std::filesystem::is_symlink(path, unknown)) return write_file_atomically(path, bytes, keep_mode);
  const auto target = std::filesystem::canonical(path, unknown);
  return write_file_atomically(unknown ? path : target.string(), bytes, keep_mode);  // a dangling link is replaced
}

}  // namespace ditfleet
