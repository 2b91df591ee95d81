// Values in the fleet's Redis, and the lock of whoever compiles one.
//   df:{0}:kernel:1:<key>                    a value of up to 1 MiB, or where the chunks of a larger one are
//   df:{0}:kernel:1:<key>:<secret>           the same of a node whose secret is not the one that signed the first
//   df:{0}:kernel:1:<key>:<secret>:lock      token of the process that compiles it
//   df:{0}:kernel:1:<key>:chunk:<id>:<i>     chunks of 1 MiB; id: of the bytes, so that two writers never mix
//   df:{0}:kernels                           zset of what is stored, by the time of its last use: <key> or
//   <key>:<secret>
// They carry the queue's hash tag: whatever serves shard 0 serves these.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "shared/core/result.h"
#include "shared/kernel_cache/breaker.h"
#include "shared/kernel_cache/key.h"
#include "shared/kernel_cache/name.h"
#include "shared/redis/connection.h"

namespace ditfleet::kernel_cache {

struct RedisTierOptions {
  redis::Endpoint endpoint;
  std::string secret_id;  // of this node
  std::chrono::milliseconds timeout{1000};
  std::chrono::milliseconds ttl{30ll * 86'400'000};
  std::chrono::milliseconds lock{2000};
};

// Thread safe. Every call blocks for at most the timeout an operation (a value of n MiB takes n + 1); with the
// breaker open it fails at once with kUnavailable. Has a thread of its own for the connection.
class RedisTier {
 public:
  static constexpr std::size_t kChunkBytes = 1u << 20;

  enum class Stored { kNow, kAlready };

  // While it lives the lock is renewed. Released by release(), or by ending: then it expires.
  class Lock {
   public:
    ~Lock() { over_ = true; }

   private:
    friend class RedisTier;
    std::string name_, token_;
    std::atomic<bool> over_{false};
  };

  explicit RedisTier(RedisTierOptions options);  // begins to connect, waits for nothing
  ~RedisTier();
  RedisTier(const RedisTier&) = delete;
  RedisTier& operator=(const RedisTier&) = delete;

  struct Value {
    std::string bytes;
    std::string head;  // of a value in chunks: what stands under its name; else empty
  };
  // Nothing where there is none. Bytes that make no sense as a value (a key of another type, chunks that are
  // gone or of another size) come back as they are, or empty: the decoder refuses them. At most kMaxValueBytes.
  Result<std::optional<Value>> fetch(const Key& key, Name name);
  // The same under the name that all share; where nothing is there (another secret's value, beside which this secret's
  // was put, may have gone), under this secret's own, and `name` says so.
  Result<std::optional<Value>> find(const Key& key, Name& name);

  struct Attempt {
    std::shared_ptr<Lock> lock;  // null: another process has it
    std::optional<Value> value;  // what is there by now
  };
  // Takes the key's lock if it is free and looks for a value in the same round trip. While another process has the
  // lock, chunks whose head is `refused_head` are not fetched again: that is what this process waits to be replaced.
  Result<Attempt> try_lock(const Key& key, Name name, std::string_view refused_head);
  void release(const std::shared_ptr<Lock>& lock);

  // Stores under `name`, unless a value is there and not `replace`. kResourceExhausted: Redis is full.
  Result<Stored> store(const Key& key, Name name, std::string_view bytes, bool replace);
  // A value that was used lives on, unless it is another secret's, which nobody here has used.
  enum class There { kNothing, kAValue, kOfAnotherSecret };
  Result<There> refresh(const Key& key, Name name);

  // --- for `ditfleet cache` -------------------------------------------------------------------------------
  struct Listed {
    Key key;
    Name name = Name::kShared;
    std::int64_t used_ms = 0;
  };
  // What is stored and has not expired; of other secrets' names none.
  Result<std::vector<Listed>> list();
  // Removes a value and its chunks. False: there was none.
  Result<bool> remove(const Key& key, Name name);

  Breaker::State breaker_state() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ditfleet::kernel_cache
