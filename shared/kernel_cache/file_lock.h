// One process of those that share a folder: a lock that ends with its holder, however that ends.
#pragma once

#include <optional>
#include <string>

namespace ditfleet::kernel_cache {

// Movable, not thread safe. Never blocks on the lock, only on the disk.
class FileLock {
 public:
  enum class Outcome { kTaken, kBusy, kImpossible };  // impossible: no file can be made there

  // kTaken fills `out`. The file is made where it is missing.
  static Outcome try_take(const std::string& path, std::optional<FileLock>& out);
  FileLock(FileLock&& other) noexcept;
  FileLock& operator=(FileLock&& other) noexcept;
  ~FileLock();  // removes the file and gives the lock up

 private:
  FileLock(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  std::string path_;
  int fd_ = -1;
};

}  // namespace ditfleet::kernel_cache
