// Values as files of a folder that several processes may share:
//   DIR/1/<hh>/<key>                    hh: the first two digits of the key; 1: the format's version
//   DIR/quarantine/<key>.<tier>.<why>   copies of refused values, for inspection; the newest kQuarantineFiles are kept
//   DIR/locks/<key>                     exists while a process of this host compiles the program
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shared/core/file_lock.h"
#include "shared/core/result.h"
#include "shared/kernel_cache/key.h"

namespace ditfleet::kernel_cache {

// Thread-safe; other processes may use the same folder at the same time. All calls block on the disk. The caller
// verifies the values.
class DiskTier {
 public:
  static constexpr std::size_t kQuarantineFiles = 64;
  static constexpr std::uint64_t kQuarantineBytes = 256u << 20;

  struct File {
    Key key;
    std::uint64_t bytes = 0;
    std::int64_t used_ms = 0;  // since 1970
  };

  DiskTier(std::string dir, std::uint64_t max_bytes) : dir_(std::move(dir)), max_bytes_(max_bytes) {}

  // Nothing if there is no such file; an empty value for what cannot be one (not a regular file, larger than any
  // value). Errors: kUnavailable (the file cannot be read).
  Result<std::optional<std::string>> read(const Key& key) const;
  // Marks a value as the most recently used, if the folder is writable.
  void used(const Key& key) const;
  // Replaces the value atomically, then removes the least recently used values until the folder is below its bound.
  // Errors: kPayloadTooLarge (the value alone exceeds the bound), kUnavailable (disk full, read-only folder, …).
  Result<void> write(const Key& key, std::string_view bytes);
  // True: a file was removed. kUnavailable: it is still there (read-only folder, …).
  Result<bool> remove(const Key& key);

  // Keeps a copy of a refused value of `tier`. False if it cannot be written.
  bool quarantine(const Key& key, std::string_view tier, std::string_view why, std::string_view bytes);

  // The lock of the process of this host that compiles `key`.
  // Errors: kConflict (another process holds it), kUnavailable (no file can be created there).
  Result<FileLock> try_lock(const Key& key);

  // All values, ordered by key. `unread`: the error of a folder that exists and cannot be read.
  std::vector<File> list(Result<void>* unread = nullptr) const;
  // Names of the files in quarantine.
  std::vector<std::string> quarantined() const;
  // Removes them and returns how many it removed. `emptied`: the error of the last file that could not be removed.
  std::size_t empty_quarantine(Result<void>& emptied);
  // Removes the least recently used values above the bound, and what crashed writers left. Called by write().
  void trim();

  std::string path_of(const Key& key) const;

 private:
  bool make_folder(const std::string& path);

  const std::string dir_;
  const std::uint64_t max_bytes_;
  std::mutex mutex_;
  std::uint64_t bytes_ = 0;    // at the last trim(), plus this process's writes since
  int writes_until_trim_ = 0;  // trim() also runs after this many writes: other processes write, too
};

}  // namespace ditfleet::kernel_cache
