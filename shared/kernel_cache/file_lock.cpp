#include "shared/kernel_cache/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace ditfleet::kernel_cache {

FileLock::Outcome FileLock::try_take(const std::string& path, std::optional<FileLock>& out) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return Outcome::kImpossible;
  if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    const bool busy = errno == EWOULDBLOCK;
    ::close(fd);
    return busy ? Outcome::kBusy : Outcome::kImpossible;
  }
  // Its holder before may have removed the file between our open and our lock: then this is a lock on nothing.
  struct stat held {
  }, there{};
  if (::fstat(fd, &held) != 0 || ::stat(path.c_str(), &there) != 0 || held.st_ino != there.st_ino ||
      held.st_dev != there.st_dev) {
    ::close(fd);
    return Outcome::kBusy;
  }
  out.emplace(FileLock(path, fd));
  return Outcome::kTaken;
}

FileLock::FileLock(FileLock&& other) noexcept : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}

FileLock& FileLock::operator=(FileLock&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  return *this;
}

FileLock::~FileLock() {
  if (fd_ < 0) return;
  ::unlink(path_.c_str());  // first, while the lock is held
  ::close(fd_);
}

}  // namespace ditfleet::kernel_cache
