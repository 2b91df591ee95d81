// One process at a time: flock(2) on a file. The kernel releases the lock of a process that dies.
#pragma once

#include <string>
#include <utility>

#include "shared/core/result.h"
#include "shared/core/unique_fd.h"

namespace ditfleet {

// Movable, not thread-safe. Never blocks on the lock, only on the disk.
class FileLock {
 public:
  enum class AtEnd { kKeepFile, kRemoveFile };

  // Locks the file `path`, which is created if it is missing.
  // Errors: kConflict (another process holds the lock), kUnavailable (the file cannot be opened or locked).
  static Result<FileLock> try_take(const std::string& path, AtEnd at_end = AtEnd::kKeepFile);

  FileLock() = default;  // holds nothing
  FileLock(FileLock&& other) noexcept { *this = std::move(other); }
  FileLock& operator=(FileLock&& other) noexcept;
  // Releases the lock unless a child process has inherited fd(); then the lock ends with the child.
  ~FileLock();
  bool held() const { return fd_.valid(); }
  int fd() const { return fd_.get(); }

 private:
  std::string remove_path_;  // empty: the file is kept
  UniqueFd fd_;
};

}  // namespace ditfleet
