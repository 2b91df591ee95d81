// The adapter files of this host: a folder of <sha256>.safetensors files that several processes can share.
//
// Each process reads a copy completely and compares it with its digest before the first use. A file is written under a
// temporary name and renamed when it is complete. The least recently used copies are removed when the folder exceeds
// its limit or its disk is full. A copy in use is locked and never removed, even if the folder exceeds its limit.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shared/core/result.h"
#include "shared/core/sha256.h"
#include "shared/core/unique_fd.h"

namespace ditfleet::worker {

// A copy in use. The file is locked until this object is destroyed. Thread-safe.
class AdapterCopy {
 public:
  AdapterCopy(std::int64_t bytes, UniqueFd fd)
      : path_("/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(fd.get())),
        bytes_(bytes),
        fd_(std::move(fd)) {}
  // The path of the open file, valid in this process and in its children while this object exists. Removing or
  // replacing the file in the folder does not affect this path.
  const std::string& path() const { return path_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::string path_;
  std::int64_t bytes_;
  UniqueFd fd_;  // holds the lock
};
using AdapterCopyPtr = std::shared_ptr<const AdapterCopy>;

// Thread-safe. Must outlive its writers, but not its copies.
class AdapterCopies {
 public:
  using DiskFree = std::int64_t (*)(const std::string& folder);  // bytes; the maximum of the type if unknown
  static std::int64_t disk_free(const std::string& folder);

  // Creates the folder when a copy is stored. If `folder` is empty, nothing can be stored and begin() fails.
  AdapterCopies(std::string folder, std::int64_t max_bytes, DiskFree free = disk_free)
      : folder_(std::move(folder)), max_bytes_(max_bytes), free_(free) {}

  // Returns a copy that this process has already checked and that has not changed since, or null. Does not block.
  AdapterCopyPtr find_checked(const std::string& sha256);
  // Returns a copy, or null if the folder has none. Checks the digest unless this process has already done so, and
  // removes the copy if the digest does not match. Blocks.
  AdapterCopyPtr find(const std::string& sha256);
  // Removes the file. Copies in use stay readable.
  void remove(const std::string& sha256);
  std::vector<std::string> digests() const;  // of all copies in the folder; blocks
  std::int64_t bytes() const;                // of all files in the folder; blocks

  // Writes one copy. Removes the partial file unless commit() succeeds. Not thread-safe; every call blocks.
  class Writer {
   public:
    ~Writer();
    // Errors: kResourceExhausted (disk full), kUnavailable (not writable), kDataCorrupt (more bytes than announced).
    Result<void> write(std::string_view bytes);
    // Errors: those of write(); kDataCorrupt if the digest differs. The message contains only the actual digest.
    Result<AdapterCopyPtr> commit();

   private:
    friend class AdapterCopies;
    Writer(AdapterCopies& copies, std::string sha256, std::int64_t bytes)
        : copies_(copies), sha256_(std::move(sha256)), bytes_(bytes) {}
    AdapterCopies& copies_;
    std::string sha256_, path_;
    std::int64_t bytes_, written_ = 0;
    UniqueFd fd_;
    Sha256 hash_;
  };
  // Starts a copy of `bytes` bytes, evicting others if space is short. Errors: those of Writer::write().
  Result<std::unique_ptr<Writer>> begin(const std::string& sha256, std::int64_t bytes);

 private:
  struct Identity {  // of a checked file
    std::uint64_t device = 0, inode = 0;
    std::int64_t bytes = 0, modified_ns = 0;
    bool operator==(const Identity&) const = default;
  };
  std::string path_of(const std::string& sha256) const { return folder_ + "/" + sha256 + ".safetensors"; }
  AdapterCopyPtr open(const std::string& sha256, Identity* identity) const;
  void evict_for(std::int64_t bytes);

  const std::string folder_;
  const std::int64_t max_bytes_;
  const DiskFree free_;
  std::mutex mutex_;
  std::map<std::string, Identity> checked_;  // by digest
};

}  // namespace ditfleet::worker
