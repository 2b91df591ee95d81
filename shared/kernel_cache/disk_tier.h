// Values as files of one folder, which several processes may share:
//   DIR/1/<hh>/<key>                    hh: first two digits of the key; 1: the format's version
//   DIR/1/<hh>/<key>.<secret>           the same of a process whose secret is not the one that signed the first
//   DIR/quarantine/<key>.<tier>.<why>   what did not verify, for a look; at most kQuarantineFiles, newest kept
//   DIR/locks/<key>                     while a process of this host compiles it
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
#include "shared/kernel_cache/name.h"

namespace ditfleet::kernel_cache {

// Thread safe; other processes may do the same in the same folder. All calls block on the disk. Bytes are
// bytes here: verifying them is the caller's.
class DiskTier {
 public:
  static constexpr std::size_t kQuarantineFiles = 64;
  static constexpr std::uint64_t kQuarantineBytes = 256u << 20;

  struct File {
    Key key;
    Name name = Name::kShared;
    std::uint64_t bytes = 0;
    std::int64_t used_ms = 0;  // since 1970
  };

  // `secret_id`: of this process.
  DiskTier(std::string dir, std::uint64_t max_bytes, std::string secret_id = {})
      : dir_(std::move(dir)), max_bytes_(max_bytes), secret_id_(std::move(secret_id)) {}

  // Nothing where there is no such file. kDataCorrupt: it is no regular file, or larger than any value; kUnavailable:
  // it cannot be read.
  Result<std::optional<std::string>> read(const Key& key, Name name = Name::kShared) const;
  // Makes it the most recently used, as far as the folder lets us.
  void used(const Key& key, Name name = Name::kShared) const;
  // Whole or not at all, and replacing what is there; then the least recently used go until the folder is below
  // its bound. kPayloadTooLarge: alone it is above the bound; kUnavailable: full, read-only, …
  Result<void> write(const Key& key, std::string_view bytes, Name name = Name::kShared);
  // Whether there was one. kUnavailable: it is still there (the folder is read-only, …).
  Result<bool> remove(const Key& key, Name name = Name::kShared);

  // Moves the file away, so that it is seen once. False if it could not be: the folder is read-only, or
  // another process was faster.
  bool quarantine(const Key& key, Name name, std::string_view why);
  // The same with bytes of another tier, of which a copy is written.
  bool quarantine(const Key& key, std::string_view tier, std::string_view why, std::string_view bytes);

  // The lock of the process of this host that compiles `key`.
  // Errors: kConflict (another process holds it), kUnavailable (no file can be created there).
  Result<FileLock> try_lock(const Key& key);

  // What is there, in the order of keys; of other secrets' names none. `unread`: a folder that is there and could not
  // be read.
  std::vector<File> list(Result<void>* unread = nullptr) const;
  // Names of the files in quarantine.
  std::vector<std::string> quarantined() const;
  // Removes them; how many went. The error is of the last that stayed.
  std::size_t empty_quarantine(Result<void>& emptied);
  // Removes what is above the bound, and what crashed writers left. Called by write().
  void trim();

  std::string path_of(const Key& key, Name name = Name::kShared) const;
  const std::string& dir() const { return dir_; }
  std::uint64_t max_bytes() const { return max_bytes_; }

 private:
  bool make_folder(const std::string& path);
  void cap_quarantine();

  const std::string dir_;
  const std::uint64_t max_bytes_;
  const std::string secret_id_;
  std::mutex mutex_;
  std::uint64_t bytes_ = 0;    // at the last look, and what was written since; others' writes are not in it
  int writes_until_trim_ = 0;  // looks again after this many
};

}  // namespace ditfleet::kernel_cache
