#include "shared/kernel_cache/cache.h"

#include <spdlog/spdlog.h>

#include <atomic>
#include <boost/asio/post.hpp>
#include <future>
#include <mutex>
#include <utility>

#include "shared/core/log_throttle.h"
#include "shared/core/named_thread.h"
#include "shared/kernel_cache/backoff.h"
#include "shared/kernel_cache/codec.h"
#include "shared/kernel_cache/counters.h"
#include "shared/kernel_cache/disk_tier.h"
#include "shared/kernel_cache/memory_tier.h"
#include "shared/kernel_cache/redis_tier.h"
#include "shared/kernel_cache/secret.h"
#include "shared/kernel_cache/single_flight.h"
#include "shared/telemetry/spans.h"

namespace ditfleet::kernel_cache {
namespace {

using std::chrono::milliseconds;

constexpr int kMaxPendingStores = 64;
constexpr milliseconds kFilePollFirst{2}, kFilePollLast{50};
// Hundreds of nodes may poll Redis for the same program.
constexpr milliseconds kRedisPollFirst{20}, kRedisPollLast{250};

// A value of a tier that failed verification, or whose program cannot be used. A later look at the same tier skips it,
// and the program that is found or compiled instead replaces it.
struct RefusedValue {
  Refusal why = Refusal::kCorrupt;
  std::string bytes;
  std::string head;  // Redis: RedisTier::Value::head
};

}  // namespace

class KernelCache::Impl {
 public:
  explicit Impl(CacheOptions options)
      : options_(std::move(options)), memory_(options_.memory_bytes), background_("kernels-store") {
    if (options_.secret && !options_.dir.empty() && options_.disk_bytes > 0)
      disk_ = std::make_unique<DiskTier>(options_.dir, options_.disk_bytes);
    if (options_.secret && options_.redis) redis_ = std::make_unique<RedisTier>(options_);
    show_counters(disk_ != nullptr, redis_ != nullptr);
  }

  Result<Program> get_or_compile(const Key& key, std::string_view region, std::string_view arch, const Compile& compile,
                                 const Validator& usable) {
    telemetry::ScopedSpan span("kernel_cache_lookup");
    span.attribute("ditfleet.kernel_cache.key", key.hex());
    span.attribute("ditfleet.region", std::string(region));
    span.attribute("ditfleet.arch", std::string(arch));
    const char* source = "memory";
    Search search{key, region, arch, usable, Deadline::after(options_.wait)};
    auto found = get_or_compile(search, compile, source);
    span.attribute("ditfleet.kernel_cache.source", std::string(source));
    if (!found) span.failed(found.error().message);
    return found;
  }

  Result<Program> find(const Key& key, std::string_view arch) {
    const Validator any;
    Search search{key, "", arch, any, Deadline::never()};
    if (Program program = from_memory(search, true)) return program;
    if (Program program = from_disk(search, true)) return program;
    if (Program program = from_redis(search)) {
      Locks none(*this);
      keep(search, program, none);
      return program;
    }
    return not_found("the kernel cache has no program with the key " + key.hex());
  }

  void flush() {
    std::promise<void> done;
    asio::post(background_.executor(), [&done] { done.set_value(); });
    done.get_future().wait();
  }

  CacheCounts counts() const { return {memory_hits_, disk_hits_, redis_hits_, compiles_, failed_compiles_, refused_}; }

 private:
  struct Search {
    const Key& key;
    std::string_view region, arch;
    const Validator& usable;
    Deadline deadline;  // of waiting for other processes
    std::optional<RefusedValue> refused_on_disk = {}, refused_in_redis = {};
    std::optional<RedisTier::Value> redis_hit = {};
    bool redis_failed = false, redis_full = false;  // this search does without Redis from then on
  };

  // The locks under which a program is compiled. keep() releases them after it has written the program; otherwise the
  // destructor does.
  struct Locks {
    explicit Locks(Impl& impl) : owner(impl) {}
    Locks(const Locks&) = delete;
    ~Locks() {
      if (fleet) owner.in_background([&impl = owner, lock = std::move(fleet)] { impl.redis_->release(lock); });
    }
    Impl& owner;
    FileLock host;
    std::shared_ptr<RedisTier::Lock> fleet;
  };

  // `source`: memory, disk, redis, compiled, or another_thread.
  Result<Program> get_or_compile(Search& search, const Compile& compile, const char*& source) {
    if (Program program = from_memory(search, true)) return program;
    bool shared = false;
    auto result = flights_.run(
        search.key,
        [&]() -> Result<Program> {
          // Another thread may have finished between the lookup above and the start of this flight.
          if (Program program = from_memory(search, false)) return program;
          return search_or_compile(search, compile, source);
        },
        shared);
    if (shared) source = "another_thread";
    return result;
  }

  Result<Program> search_or_compile(Search& search, const Compile& compile, const char*& source) {
    source = "disk";
    if (Program program = from_disk(search, true)) return program;
    Locks locks(*this);
    if (Program program = take_host_lock(search, locks)) return program;
    source = "redis";
    Program program = from_redis(search);
    if (!program) program = take_fleet_lock(search, locks);
    if (!program) {
      source = "compiled";
      auto compiled = compile();
      ++(compiled ? compiles_ : failed_compiles_);
      count_compile(compiled ? "ok" : "error");
      if (!compiled) return compiled.error();
      if (compiled->arch != search.arch) {
        return internal_error("[kernel_cache] the compiler returned a program for '" + compiled->arch +
                              "' instead of '" + std::string(search.arch) + "'");
      }
      program = std::make_shared<const Entry>(std::move(*compiled));
      if (search.usable)
        if (auto used = search.usable(*program); !used) return used.error();
      memory_.put(search.key, program);
    }
    keep(search, program, locks);
    return program;
  }

  Program from_memory(const Search& search, bool count) {
    Program program = memory_.find(search.key);
    if (program) {
      std::optional<Refused> refused;
      if (program->arch != search.arch)
        refused = Refused{Refusal::kWrongArch, "it is for " + program->arch};
      else if (search.usable)
        if (const auto used = search.usable(*program); !used) refused = {Refusal::kUnusable, used.error().message};
      if (refused) {
        report(search, "memory", *refused);
        memory_.erase(search.key, program);
        return nullptr;
      }
      ++memory_hits_;
    }
    if (program || count) count_lookup("memory", program ? "hit" : "miss");
    return program;
  }

  // A second look at the disk (`first` is false) counts only new values.
  Program from_disk(Search& search, bool first) {
    if (!disk_) return nullptr;
    auto bytes = disk_->read(search.key);
    if (!bytes || !*bytes) {
      if (first) count_lookup("disk", bytes ? "miss" : "error");
      if (first && !bytes) warn(disk_throttle_, bytes.error());
      return nullptr;
    }
    Program program = check(search, "disk", search.refused_on_disk, {std::move(**bytes), {}});
    if (!program) return nullptr;
    ++disk_hits_;
    disk_->used(search.key);
    return program;
  }

  Program from_redis(Search& search) {
    if (!redis_) {
      search.redis_failed = true;
      return nullptr;
    }
    return judge(search, redis_->fetch(search.key), true);
  }

  Program judge(Search& search, Result<std::optional<RedisTier::Value>> found, bool first) {
    if (!found) {
      const bool left_out = redis_->breaker_state() != Breaker::State::kClosed;
      count_lookup("redis", left_out ? "left_out" : "error");
      if (!left_out) warn(redis_throttle_, found.error());
      search.redis_failed = true;
      return nullptr;
    }
    if (!*found) {
      if (first) count_lookup("redis", "miss");
      return nullptr;
    }
    Program program = check(search, "redis", search.refused_in_redis, **found);
    if (!program) return nullptr;
    ++redis_hits_;
    search.redis_hit = std::move(**found);
    return program;
  }

  // The program in a value of a tier, now in memory, too; null if it fails verification or cannot be used.
  Program check(const Search& search, std::string_view tier, std::optional<RefusedValue>& refused,
                const RedisTier::Value& value) {
    if (refused && refused->bytes == value.bytes) return nullptr;
    auto entry = decode(value.bytes, search.key, search.arch, *options_.secret);
    Refused why;
    if (!entry) {
      why = entry.error();
    } else {
      auto program = std::make_shared<const Entry>(std::move(*entry));
      const auto used = search.usable ? search.usable(*program) : Result<void>();
      if (used) {
        refused.reset();
        count_lookup(tier, "hit");
        memory_.put(search.key, program);
        return program;
      }
      why = {Refusal::kUnusable, used.error().message};
    }
    report(search, tier, why);
    refused = RefusedValue{why.why, value.bytes, value.head};
    return nullptr;
  }

  // One process of this host at a time. The others wait, and then find the program on disk.
  Program take_host_lock(Search& search, Locks& locks) {
    if (!disk_) return nullptr;
    Backoff backoff(kFilePollFirst, kFilePollLast);
    for (bool waited = false;; waited = true) {
      auto lock = disk_->try_lock(search.key);
      const bool busy = !lock && lock.error().code == Code::kConflict;
      if (busy && !search.deadline.passed()) {
        backoff.wait(search.deadline);
        continue;
      }
      if (lock) locks.host = std::move(*lock);
      Program program = from_disk(search, false);
      if (waited) count_wait(program ? "hit" : locks.host.held() ? "took_over" : busy ? "timeout" : "error");
      return program;
    }
  }

  // One process of the fleet at a time.
  Program take_fleet_lock(Search& search, Locks& locks) {
    Backoff backoff(kRedisPollFirst, kRedisPollLast);
    for (bool waited = false; !search.redis_failed; waited = true) {
      auto attempt = redis_->try_lock(search.key, search.refused_in_redis ? search.refused_in_redis->head : "");
      Program program;
      if (!attempt && attempt.error().code == Code::kResourceExhausted) {
        count_store("redis", "full");
        warn(redis_throttle_, attempt.error());
        search.redis_failed = search.redis_full = true;
      } else if (!attempt) {
        (void)judge(search, attempt.error(), false);
      } else {
        locks.fleet = std::move(attempt->lock);
        if (attempt->value) program = judge(search, std::move(attempt->value), false);
      }
      const bool over = search.deadline.passed();
      if (waited && (program || locks.fleet || over || search.redis_failed))
        count_wait(program ? "hit" : locks.fleet ? "took_over" : over ? "timeout" : "error");
      if (program || locks.fleet || over) return program;
      if (!search.redis_failed) backoff.wait(search.deadline);
    }
    return nullptr;
  }

  // Writes the program to the tiers that lack it, then releases the locks. Waiting processes thus find it.
  void keep(Search& search, Program program, Locks& locks) {
    in_background([this, key = search.key, program = std::move(program), host = std::move(locks.host),
                   fleet = std::exchange(locks.fleet, nullptr), disk_refused = std::move(search.refused_on_disk),
                   redis_refused = std::move(search.refused_in_redis), redis_hit = std::move(search.redis_hit),
                   full = search.redis_full]() mutable {
      if (disk_ || redis_) {
        const auto bytes =
            redis_hit ? Result<std::string>(std::move(redis_hit->bytes)) : encode(*program, key, *options_.secret);
        if (!bytes) spdlog::warn("kernel cache: a program is kept in memory only: {}", bytes.error().message);
        if (bytes && disk_) {
          quarantine(key, "disk", disk_refused);
          write_disk(key, *bytes);
        }
        host = FileLock();
        if (redis_hit) {
          redis_->refresh(key, redis_hit->head);
        } else if (bytes && redis_ && !full) {  // also after a failure: compiling took time, and Redis may be back
          quarantine(key, "redis", redis_refused);
          write_redis(key, *bytes, redis_refused.has_value());
        }
      }
      if (fleet) redis_->release(fleet);
    });
  }

  void quarantine(const Key& key, std::string_view tier, const std::optional<RefusedValue>& refused) {
    if (refused && disk_ && disk_->quarantine(key, tier, refusal_name(refused->why), refused->bytes))
      count_quarantined(tier, refusal_name(refused->why));
  }

  void write_disk(const Key& key, std::string_view bytes) {
    const auto written = disk_->write(key, bytes);
    count_store("disk", written ? "stored" : "error");
    if (!written) warn(disk_throttle_, written.error());
  }

  void write_redis(const Key& key, std::string_view bytes, bool replace) {
    const auto stored = redis_->store(key, bytes, replace);
    if (stored) {
      count_store("redis", *stored == RedisTier::Stored::kNow ? "stored" : "already");
      return;
    }
    const bool left_out = redis_->breaker_state() == Breaker::State::kOpen;
    count_store("redis", stored.error().code == Code::kResourceExhausted ? "full" : left_out ? "left_out" : "error");
    if (!left_out) warn(redis_throttle_, stored.error());
  }

  void report(const Search& search, std::string_view tier, const Refused& refused) {
    ++refused_;
    count_lookup(tier, refusal_name(refused.why));
    spdlog::warn("kernel cache: refused the program {} (region {}, {}) from {}: {}: {}", search.key.hex(),
                 search.region.empty() ? "?" : search.region, search.arch, tier, refusal_name(refused.why),
                 refused.message);
  }

  // A full disk fails for every program.
  void warn(LogThrottle& throttle, const Error& error) {
    const std::lock_guard lock(throttle_mutex_);
    if (const auto more = throttle.admit()) spdlog::warn("kernel cache: {}{}", error.message, *more);
  }

  // Runs `task` on the cache's thread, or here if too many tasks are pending.
  template <class Task>
  void in_background(Task task) {
    if (++pending_ > kMaxPendingStores) {
      task();
      --pending_;
      return;
    }
    asio::post(background_.executor(), [this, task = std::move(task)]() mutable {
      task();
      --pending_;
    });
  }

  const CacheOptions options_;
  MemoryTier memory_;
  std::unique_ptr<DiskTier> disk_;
  std::unique_ptr<RedisTier> redis_;
  SingleFlight flights_;
  std::atomic<std::uint64_t> memory_hits_{0}, disk_hits_{0}, redis_hits_{0}, compiles_{0}, failed_compiles_{0},
      refused_{0};
  std::mutex throttle_mutex_;
  LogThrottle disk_throttle_, redis_throttle_;  // under throttle_mutex_
  std::atomic<int> pending_{0};
  NamedThread background_;  // last: its tasks use the others
};

KernelCache::KernelCache(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
KernelCache::~KernelCache() = default;

std::unique_ptr<KernelCache> KernelCache::create(CacheOptions options) {
  return std::unique_ptr<KernelCache>(new KernelCache(std::make_unique<Impl>(std::move(options))));
}

Result<KernelCache::Program> KernelCache::get_or_compile(const Key& key, std::string_view region, std::string_view arch,
                                                         const Compile& compile, const Validator& usable) {
  return impl_->get_or_compile(key, region, arch, compile, usable);
}

Result<KernelCache::Program> KernelCache::find(const Key& key, std::string_view arch) { return impl_->find(key, arch); }
void KernelCache::flush() { impl_->flush(); }
CacheCounts KernelCache::counts() const { return impl_->counts(); }

}  // namespace ditfleet::kernel_cache
