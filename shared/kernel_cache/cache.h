// Compiled programs by key, in three tiers: memory, disk, Redis. A program that no tier has is compiled. Every process
// of the fleet finds what one has compiled. A tier that fails never fails a lookup.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "shared/core/result.h"
#include "shared/kernel_cache/entry.h"
#include "shared/kernel_cache/key.h"
#include "shared/redis/connection.h"

namespace ditfleet::kernel_cache {

class Secret;

struct CacheOptions {
  std::uint64_t memory_bytes = 256u << 20;  // 0: no memory tier
  std::string dir;                          // empty: no disk tier
  std::uint64_t disk_bytes = 2ull << 30;    // above it the least recently used are removed; 0: no disk tier
  std::optional<redis::Endpoint> redis;     // none: no Redis tier
  // Signs and verifies the values on disk and in Redis. Null: memory tier only.
  std::shared_ptr<const Secret> secret;

  std::chrono::milliseconds redis_timeout{1000};           // of one operation
  std::chrono::milliseconds redis_ttl{30ll * 86'400'000};  // since a value was last read from Redis
  // How long the lock of a process that compiles lives without renewal: how long others wait if that process dies.
  std::chrono::milliseconds lock{2000};
  // The longest wait for other processes in one lookup. After it this process compiles the program itself.
  std::chrono::milliseconds wait{8000};
};

// Since the cache was created.
struct CacheCounts {
  std::uint64_t memory_hits = 0, disk_hits = 0, redis_hits = 0;
  std::uint64_t compiles = 0, failed_compiles = 0;
  std::uint64_t refused = 0;  // values that failed verification or could not be used, in any tier
  std::uint64_t hits() const { return memory_hits + disk_hits + redis_hits; }
};

// Thread-safe. Calls block: on files, on Redis (each operation has a deadline, and a circuit breaker leaves out a Redis
// that fails), on another thread or process that compiles the same key, and on `compile`.
class KernelCache {
 public:
  using Program = std::shared_ptr<const Entry>;
  using Compile = std::function<Result<Entry>()>;
  // Whether the caller can use a program that verified, for example load it. The error says why it cannot.
  using Validator = std::function<Result<void>(const Entry&)>;

  // Opens no file and waits for nothing. Errors of a tier are counted and logged when it is used.
  static std::unique_ptr<KernelCache> create(CacheOptions options);
  ~KernelCache();  // flush()
  KernelCache(const KernelCache&) = delete;
  KernelCache& operator=(const KernelCache&) = delete;

  // Returns the program of `key` from the nearest tier, or compiles it on the calling thread. Within a process a key is
  // compiled by one thread at a time; the others wait for it and share its result, including an error. Within the fleet
  // it is compiled once, as long as Redis or a shared folder is available. The wait for other processes is bounded by
  // CacheOptions::wait.
  //
  // Errors: those of `compile`, unchanged and not cached; kInternal if `compile` returns a program for another
  // architecture than `arch`; those of `usable`, see below. An exception of `compile` goes to its caller, and threads
  // that share the wait get kInternal. A program beyond entry.h's limits is kept in memory only. `region` is for logs.
  //
  // `usable` is called on the calling thread for each program that a tier has or `compile` returns. Without it every
  // program counts as usable. A program that is not usable is skipped. The one that another process or `compile`
  // provides instead replaces it in each tier. If that one is not usable either, the fault may be this process's own:
  // the tiers stay as they are, and the caller gets the error of `usable`. Threads that share the wait get the program
  // without a call of their own `usable`.
  //
  // The cache's own thread writes a new program to disk and to Redis after this has returned.
  Result<Program> get_or_compile(const Key& key, std::string_view region, std::string_view arch, const Compile& compile,
                                 const Validator& usable = {});

  // The same without a compiler: kNotFound if no tier has it. Does not wait for other processes.
  Result<Program> find(const Key& key, std::string_view arch);

  // Returns once every program compiled so far has been written or has failed to be written.
  void flush();

  CacheCounts counts() const;

 private:
  class Impl;
  explicit KernelCache(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ditfleet::kernel_cache
