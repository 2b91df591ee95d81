// Encoded entries in Redis, and the fleet's locks for compiling programs.
//   df:{0}:kernel:1:<key>                 an encoded entry of up to 1 MiB, or the head of a larger one:
//                                         "DFCHUNKS <id> <bytes>"
//   df:{0}:kernel:1:<key>:chunk:<id>:<i>  chunks of 1 MiB; <id> is derived from the whole encoding, so that the chunks
//                                         of two writers never mix
//   df:{0}:kernel:1:<key>:<secret>:lock   token of the process that compiles the program
//   df:{0}:kernels                        sorted set of the stored keys by the time of their last use
// The keys have the hash tag of the queue's shard 0, so that they are on the same server.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shared/core/result.h"
#include "shared/kernel_cache/breaker.h"
#include "shared/kernel_cache/cache.h"
#include "shared/kernel_cache/key.h"

namespace ditfleet::kernel_cache {

// Thread-safe. Every call blocks for at most one timeout per operation; an entry of n MiB needs n + 1 operations. While
// the breaker is open, every call fails immediately with kUnavailable. The connection uses a separate thread.
class RedisTier {
 public:
  static constexpr std::size_t kChunkBytes = 1u << 20;

  enum class Stored { kNow, kAlready };

  // A lock, renewed until release() or the destruction of the object. Without release(), it expires afterwards.
  class Lock {
   public:
    ~Lock() { over_ = true; }

   private:
    friend class RedisTier;
    std::string name_, token_;
    std::atomic<bool> over_{false};
  };

  // Starts to connect and does not wait for it. Needs options.redis; try_lock() also needs options.secret.
  explicit RedisTier(CacheOptions options);
  ~RedisTier();
  RedisTier(const RedisTier&) = delete;
  RedisTier& operator=(const RedisTier&) = delete;

  struct Value {
    std::string bytes;
    std::string head;  // of an entry in chunks, else empty
  };
  // Returns the encoded entry, or nothing if there is none. An invalid entry, such as one with missing chunks, is
  // returned unchanged or empty; the decoder rejects it. Reads at most kMaxValueBytes.
  Result<std::optional<Value>> fetch(const Key& key);

  struct Attempt {
    std::shared_ptr<Lock> lock;  // null: another process holds it
    std::optional<Value> value;  // the stored entry, if any
  };
  // Takes the key's lock if it is free, and reads the entry in the same round trip. While another process has the lock,
  // chunks with the head `refused_head` are not read again, because that process will replace them.
  Result<Attempt> try_lock(const Key& key, std::string_view refused_head);
  void release(const std::shared_ptr<Lock>& lock);

  // Stores an entry. Unless `replace`, keeps an existing entry. kResourceExhausted: Redis is full.
  Result<Stored> store(const Key& key, std::string_view bytes, bool replace);
  // Restarts the TTL of an entry that was used.
  void refresh(const Key& key, std::string_view head);

  // --- for `ditfleet cache` -------------------------------------------------------------------------------
  struct Listed {
    Key key;
    std::int64_t used_ms = 0;
  };
  // Lists the entries that have not expired.
  Result<std::vector<Listed>> list();
  // Removes an entry with its chunks. Returns whether there was one.
  Result<bool> remove(const Key& key);

  Breaker::State breaker_state() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ditfleet::kernel_cache
