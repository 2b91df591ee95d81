// The files of adapters on this host: a folder of <sha256>.safetensors, of which the least recently used go where it
// grows too large or its disk is full. Several processes may share it.
//
// What is handed out has been read to its end and compared with its name. A file is written under another name first,
// so nobody sees a part of one. Whoever uses a copy holds a lock on it; what is in use stays, also if the folder is
// over its size by that.
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

namespace ditfleet::worker {

// In use while it lives. Any thread.
class AdapterCopy {
 public:
  AdapterCopy(std::int64_t bytes, int fd) : path_("/proc/self/fd/" + std::to_string(fd)), bytes_(bytes), fd_(fd) {}
  ~AdapterCopy();
  AdapterCopy(const AdapterCopy&) = delete;
  AdapterCopy& operator=(const AdapterCopy&) = delete;
  // Of what is open here, in this process alone: what becomes of the name in the folder changes nothing.
  const std::string& path() const { return path_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::string path_;
  std::int64_t bytes_;
  int fd_;  // holds the lock
};
using AdapterCopyPtr = std::shared_ptr<const AdapterCopy>;

// Thread safe. Must outlive its writers, not its copies.
class AdapterCopies {
 public:
  using DiskFree = std::int64_t (*)(const std::string& folder);  // bytes; as many as there can be where nobody knows
  static std::int64_t disk_free(const std::string& folder);

  // An empty folder: nothing can be kept, and every write says so. The folder is made when it is needed.
  AdapterCopies(std::string folder, std::int64_t max_bytes, DiskFree free = disk_free)
      : folder_(std::move(folder)), max_bytes_(max_bytes), free_(free) {}

  // A copy that this process has checked before and that has not changed since; else null. Does not block.
  AdapterCopyPtr find_checked(const std::string& sha256);
  // A copy, read to its end if this process has not yet; null if there is none. One that is not what its name says is
  // removed. Blocks.
  AdapterCopyPtr find(const std::string& sha256);
  // Nobody's from here on; who has it open keeps it.
  void remove(const std::string& sha256);
  std::vector<std::string> digests() const;  // of all copies in the folder; blocks
  std::int64_t bytes() const;                // of all files in the folder; blocks

  // A copy in the making; without commit() nothing stays. One thread at a time; all calls block.
  class Writer {
   public:
    Writer(Writer&&) noexcept;
    Writer& operator=(Writer&&) = delete;
    ~Writer();
    // kResourceExhausted: no room on the disk. kUnavailable: it cannot be written. kDataCorrupt: more than was said.
    Result<void> write(std::string_view bytes);
    // kDataCorrupt: what was written is not what the name says; the message is only what it is instead.
    Result<AdapterCopyPtr> commit();

   private:
    friend class AdapterCopies;
    Writer(AdapterCopies& copies, std::string sha256, std::int64_t bytes)
        : copies_(copies), sha256_(std::move(sha256)), bytes_(bytes) {}
    AdapterCopies& copies_;
    std::string sha256_, path_;
    std::int64_t bytes_, written_ = 0;
    int fd_ = -1;
    Sha256 hash_;
  };
  // Makes room first. Errors as Writer::write's.
  Result<Writer> begin(const std::string& sha256, std::int64_t bytes);

 private:
  struct Identity {  // of a file that was checked
    std::uint64_t device = 0, inode = 0;
    std::int64_t bytes = 0, modified_ns = 0;
    bool operator==(const Identity&) const = default;
  };
  std::string path_of(const std::string& sha256) const { return folder_ + "/" + sha256 + ".safetensors"; }
  AdapterCopyPtr open(const std::string& sha256, Identity* identity) const;
  void make_room(std::int64_t bytes);

  const std::string folder_;
  const std::int64_t max_bytes_;
  const DiskFree free_;
  std::mutex mutex_;
  std::map<std::string, Identity> checked_;  // by digest
};

}  // namespace ditfleet::worker
