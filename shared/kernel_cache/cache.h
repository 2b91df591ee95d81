// Compiled programs by key: memory, disk, Redis, and a compiler for what none of them has. What one process
// has compiled, every process of the fleet finds. Whatever is wrong with a tier, the caller gets its program.
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
  std::uint64_t disk_bytes = 2ull << 30;    // beyond it the least recently used go; 0: no disk tier
  std::optional<redis::Endpoint> redis;     // none: no Redis tier
  // Signs and verifies what leaves the process. Without it there is the memory tier alone.
  std::shared_ptr<const Secret> secret;

  std::chrono::milliseconds redis_timeout{1000};           // of one operation
  std::chrono::milliseconds redis_ttl{30ll * 86'400'000};  // from the last use
  // A process that compiles holds a lock this long and renews it; if it dies, others wait no longer than this.
  std::chrono::milliseconds lock{2000};
  // The longest wait for another process's compiler, in all; then this one compiles itself.
  std::chrono::milliseconds wait{8000};
};

// What happened so far, of this object.
struct CacheCounts {
  std::uint64_t memory_hits = 0, disk_hits = 0, redis_hits = 0;
  std::uint64_t compiles = 0, failed_compiles = 0;
  std::uint64_t refused = 0;  // values that did not verify or could not be used, in any tier
  std::uint64_t hits() const { return memory_hits + disk_hits + redis_hits; }
};

// Thread safe. Every call may block: on files, on Redis (each operation has a deadline, and a breaker leaves
// out a Redis that fails), on another thread or process that compiles the same key, and on `compile`.
class KernelCache {
 public:
  using Program = std::shared_ptr<const Entry>;
  using Compile = std::function<Result<Entry>()>;
  // Whether who asks can use a program that verified: the error says why it cannot.
  using Usable = std::function<Result<void>(const Entry&)>;

  // Opens no file and waits for nothing: what a tier lacks shows, counted and logged, when it is used.
  static std::unique_ptr<KernelCache> create(CacheOptions options);
  ~KernelCache();  // flush()
  KernelCache(const KernelCache&) = delete;
  KernelCache& operator=(const KernelCache&) = delete;

  // The program of `key`, from the nearest tier or from `compile`, which runs on the calling thread, at most
  // once at a time for a key in this process, and in the fleet as long as Redis or a shared folder is there.
  // Threads that ask for a key that is being compiled wait for it and share the outcome, also an error.
  // Waiting for other processes is bounded by CacheOptions::wait.
  //
  // Errors: those of `compile`, unchanged and remembered by no tier; kInternal if what it made is for another
  // architecture than `arch`. What it throws goes to the caller; who shared the wait gets kInternal. What is
  // beyond entry.h's limits is returned, but kept in memory only. `region` is for logs.
  //
  // `usable` is asked on the calling thread, once for each program that a tier has or `compile` makes; without one all
  // can be used. What cannot be is passed over, and what another process or `compile` brings instead takes its place,
  // in each tier where it lay. Where that cannot be used either, the fault may be this process's alone: the tiers stay
  // as they are, and the caller gets `usable`'s error. Threads that shared the wait get the program without having been
  // asked.
  //
  // A new program is written to disk and to Redis on a thread of the cache after this has returned.
  Result<Program> get_or_compile(const Key& key, std::string_view region, std::string_view arch, const Compile& compile,
                                 const Usable& usable = {});

  // The same without a compiler: kNotFound if no tier has it. Waits for nobody.
  Result<Program> find(const Key& key, std::string_view arch);

  // Returns once everything compiled so far has been written, or has failed to be.
  void flush();

  CacheCounts counts() const;

 private:
  class Impl;
  explicit KernelCache(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ditfleet::kernel_cache
