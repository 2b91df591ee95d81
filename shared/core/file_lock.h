// A lock between processes: flock(2) on a file. The kernel releases the lock if the process dies.
#pragma once

#include <string>
#include <utility>

#include "shared/core/result.h"
#include "shared/core/unique_fd.h"

namespace ditfleet {

// Movable. Not thread-safe. Never waits for the lock, but blocks on the disk.
class FileLock {
 public:
  enum class AtEnd { kKeepFile, kRemoveFile };

  // Locks the file `path`. Creates a missing file.
  // Errors: kConflict (another process holds the lock), kUnavailable (the file cannot be opened or locked).
  static Result<FileLock> try_take(const std::string& path, AtEnd at_end = AtEnd::kKeepFile);

  FileLock() = default;  // no lock
  FileLock(FileLock&& other) noexcept { *this = std::move(other); }
  FileLock& operator=(FileLock&& other) noexcept;
  // Releases the lock. If a child process has inherited fd(), the lock stays until the child ends.
  ~FileLock();
  bool held() const { return fd_.valid(); }
  int fd() const { return fd_.get(); }

 private:
  std::string remove_path_;  // empty: the file is kept
  UniqueFd fd_;
};

}  // namespace ditfleet
