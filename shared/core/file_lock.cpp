#include "shared/core/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace ditfleet {

Result<FileLock> FileLock::try_take(const std::string& path, AtEnd at_end) {
  const auto failed = [&](const char* what) {
    return unavailable(std::string("cannot ") + what + " '" + path + "': " + std::strerror(errno));
  };
  const Error busy{Code::kConflict, "'" + path + "' is locked"};
  FileLock lock;
  lock.fd_.reset(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock.held()) return failed("open");
  if (::flock(lock.fd(), LOCK_EX | LOCK_NB) != 0) return errno == EWOULDBLOCK ? busy : failed("lock");
  // The previous holder may have removed the file between open() and flock(). Then this lock protects nothing.
  struct stat locked {
  }, named{};
  if (::fstat(lock.fd(), &locked) != 0 || ::stat(path.c_str(), &named) != 0 || locked.st_ino != named.st_ino ||
      locked.st_dev != named.st_dev)
    return busy;
  if (at_end == AtEnd::kRemoveFile) lock.remove_path_ = path;
  return lock;
}

FileLock& FileLock::operator=(FileLock&& other) noexcept {
  std::swap(remove_path_, other.remove_path_);
  std::swap(fd_, other.fd_);
  return *this;
}

FileLock::~FileLock() {
  if (held() && !remove_path_.empty()) ::unlink(remove_path_.c_str());  // while the lock is held
}

}  // namespace ditfleet
