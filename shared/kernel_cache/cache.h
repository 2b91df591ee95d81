// The cache of compiled programs in three tiers: memory, disk and Redis. A program that no tier has is compiled. Other
// processes then find it on disk or in Redis. An error of a tier never fails a lookup; it is only counted and logged.
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
  std::uint64_t disk_bytes = 2ull << 30;    // limit; evicts the least recently used entries; 0: no disk tier
  std::optional<redis::Endpoint> redis;     // none: no Redis tier
  // Signs and verifies the entries on disk and in Redis. Null: only the memory tier is used.
  std::shared_ptr<const Secret> secret;

  std::chrono::milliseconds redis_timeout{1000};           // of one operation
  std::chrono::milliseconds redis_ttl{30ll * 86'400'000};  // of an entry, restarted when it is read
  // The lock of a compiling process expires after this time without renewal. Other nodes wait this long if the process
  // dies.
  std::chrono::milliseconds lock{2000};
  // The maximum wait for other processes in one lookup. Afterwards this process compiles the program.
  std::chrono::milliseconds wait{8000};
};

// Counts since the creation of the cache.
struct CacheCounts {
  std::uint64_t memory_hits = 0, disk_hits = 0, redis_hits = 0;
  std::uint64_t compiles = 0, failed_compiles = 0;
  std::uint64_t refused = 0;  // entries in any tier that failed verification or could not be used
  std::uint64_t hits() const { return memory_hits + disk_hits + redis_hits; }
};

// Thread-safe. Lookups block on files, on Redis, on other threads or processes that compile the same key, and on
// `compile`. Each Redis operation has a deadline, and a circuit breaker skips a failing Redis.
class KernelCache {
 public:
  using Program = std::shared_ptr<const Entry>;
  using Compile = std::function<Result<Entry>()>;
  // Checks whether the caller can use a verified program, for example load it. The error is the reason why it cannot.
  using Validator = std::function<Result<void>(const Entry&)>;

  // Does not block or open files. Errors of a tier are counted and logged when the tier is used.
  static std::unique_ptr<KernelCache> create(CacheOptions options);
  ~KernelCache();  // flush()
  KernelCache(const KernelCache&) = delete;
  KernelCache& operator=(const KernelCache&) = delete;

  // Returns the program of `key` from the first tier that has it, or compiles it on the calling thread. In a process,
  // only one thread compiles a key; other threads wait and share its result, including an error. In the fleet, only one
  // process compiles a key, as long as Redis or a shared folder is available. CacheOptions::wait limits the wait for
  // other processes. A background thread writes a new program to disk and Redis. A program beyond the limits of entry.h
  // is kept only in memory. `region` is for logs.
  //
  // Errors: those of `compile`, which are not cached; those of `usable`; kInternal if the architecture of the compiled
  // program is not `arch`. If `compile` throws, the exception is rethrown, and waiting threads get kInternal.
  //
  // `usable` is called on the calling thread for each program from a tier or from `compile`. Without `usable`, every
  // program counts as usable. The lookup skips an unusable program and replaces it with a usable one in each tier. If
  // the compiled program is unusable, too, this process may be at fault: the tiers stay unchanged, and the caller gets
  // the error of `usable`. For waiting threads, `usable` is not called.
  Result<Program> get_or_compile(const Key& key, std::string_view region, std::string_view arch, const Compile& compile,
                                 const Validator& usable = {});

  // Returns the program without compiling it or waiting for other processes. kNotFound: no tier has the program.
  Result<Program> find(const Key& key, std::string_view arch);

  // Blocks until every program compiled so far has been written, or writing it has failed.
  void flush();

  CacheCounts counts() const;

 private:
  class Impl;
  explicit KernelCache(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ditfleet::kernel_cache
