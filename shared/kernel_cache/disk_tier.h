// Encoded entries as files in a folder that several processes may share:
//   DIR/1/<hh>/<key>                    an entry; 1 is the format's version, hh the first two digits of the key
//   DIR/quarantine/<key>.<tier>.<why>   a copy of a rejected entry; the newest kQuarantineFiles are kept
//   DIR/locks/<key>                     locked with flock while a process on this host compiles the program
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

// Thread-safe; other processes may use the folder concurrently. All calls block on the disk. Does not verify entries.
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

  // Returns the encoded entry, or nothing if there is no such file. Returns an empty text for a file that cannot be an
  // entry: it is not regular or too large. Errors: kUnavailable (the file cannot be read).
  Result<std::optional<std::string>> read(const Key& key) const;
  // Marks an entry as the most recently used, if the folder is writable.
  void used(const Key& key) const;
  // Replaces the entry atomically, then evicts the least recently used entries until the folder is within its limit.
  // Errors: kPayloadTooLarge (the entry alone exceeds the limit), kUnavailable (disk full, read-only folder, …).
  Result<void> write(const Key& key, std::string_view bytes);
  // Returns whether a file was removed. kUnavailable: the file cannot be removed (read-only folder, …).
  Result<bool> remove(const Key& key);

  // Keeps a copy of a rejected entry of `tier`. Returns false if the copy cannot be written.
  bool quarantine(const Key& key, std::string_view tier, std::string_view why, std::string_view bytes);

  // Takes this host's lock for compiling `key`.
  // Errors: kConflict (another process holds it), kUnavailable (no file can be created there).
  Result<FileLock> try_lock(const Key& key);

  // Lists all entries, ordered by key. `unread` is set to the error of a folder that exists but cannot be read.
  std::vector<File> list(Result<void>* unread = nullptr) const;
  // Names of the files in quarantine.
  std::vector<std::string> quarantined() const;
  // Removes the files in quarantine and returns their number. `emptied` is set to the error of the last file that could
  // not be removed.
  std::size_t empty_quarantine(Result<void>& emptied);
  // Evicts entries above the limit and removes temporary files of crashed writers. write() calls it.
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
