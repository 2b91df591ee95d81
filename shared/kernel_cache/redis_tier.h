// Values in the fleet's Redis, and the lock of the process that compiles a program.
//   df:{0}:kernel:1:<key>                 a value of up to 1 MiB, or "DFCHUNKS <id> <bytes>", the head of a larger one
//   df:{0}:kernel:1:<key>:chunk:<id>:<i>  chunks of 1 MiB; <id> is derived from the whole value, so that the chunks of
//                                         two writers never mix
//   df:{0}:kernel:1:<key>:<secret>:lock   token of the process that compiles it
//   df:{0}:kernels                        zset of the stored keys by the time of their last use
// The hash tag is the queue's: the server of shard 0 serves these keys.
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
#include "shared/kernel_cache/key.h"
#include "shared/redis/connection.h"

namespace ditfleet::kernel_cache {

struct RedisTierOptions {
  redis::Endpoint endpoint;
  std::string secret_id;  // nodes with different secrets do not wait for each other
  std::chrono::milliseconds timeout{1000};
  std::chrono::milliseconds ttl{30ll * 86'400'000};
  std::chrono::milliseconds lock{2000};
};

// Thread-safe. Every call blocks for at most one timeout per operation (a value of n MiB takes n + 1 operations). While
// the breaker is open, every call fails at once with kUnavailable. The connection has a thread of its own.
class RedisTier {
 public:
  static constexpr std::size_t kChunkBytes = 1u << 20;

  enum class Stored { kNow, kAlready };

  // Renewed while the object lives. release() ends the lock; otherwise it expires after the object has been destroyed.
  class Lock {
   public:
    ~Lock() { over_ = true; }

   private:
    friend class RedisTier;
    std::string name_, token_;
    std::atomic<bool> over_{false};
  };

  explicit RedisTier(RedisTierOptions options);  // starts to connect and does not wait for it
  ~RedisTier();
  RedisTier(const RedisTier&) = delete;
  RedisTier& operator=(const RedisTier&) = delete;

  struct Value {
    std::string bytes;
    std::string head;  // of a value in chunks, else empty
  };
  // Nothing if there is none. What cannot be a value (another type, chunks that are missing or of a wrong size) is
  // returned as it is or empty, for the decoder to refuse. Reads at most kMaxValueBytes.
  Result<std::optional<Value>> fetch(const Key& key);

  struct Attempt {
    std::shared_ptr<Lock> lock;  // null: another process holds it
    std::optional<Value> value;  // what is stored by now
  };
  // Takes the key's lock if it is free, and looks for a value in the same round trip. While another process holds the
  // lock, chunks whose head is `refused_head` are not fetched again: this process waits for their replacement.
  Result<Attempt> try_lock(const Key& key, std::string_view refused_head);
  void release(const std::shared_ptr<Lock>& lock);

  // Stores a value unless one is there; `replace` overwrites it. kResourceExhausted: Redis is full.
  Result<Stored> store(const Key& key, std::string_view bytes, bool replace);
  // Restarts the TTL of a value that was used.
  void refresh(const Key& key, std::string_view head);

  // --- for `ditfleet cache` -------------------------------------------------------------------------------
  struct Listed {
    Key key;
    std::int64_t used_ms = 0;
  };
  // The values that are stored and have not expired.
  Result<std::vector<Listed>> list();
  // Removes a value and its chunks. False: there was none.
  Result<bool> remove(const Key& key);

  Breaker::State breaker_state() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ditfleet::kernel_cache
