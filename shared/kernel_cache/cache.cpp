// Long because it is one way through the tiers: a lookup, a wait and a compile under the same locks.
#include "shared/kernel_cache/cache.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "shared/kernel_cache/allowance.h"
#include "shared/kernel_cache/background.h"
#include "shared/kernel_cache/codec.h"
#include "shared/kernel_cache/counters.h"
#include "shared/kernel_cache/disk_tier.h"
#include "shared/kernel_cache/flights.h"
#include "shared/kernel_cache/memory_tier.h"
#include "shared/kernel_cache/patience.h"
#include "shared/kernel_cache/redis_tier.h"
#include "shared/kernel_cache/secret.h"
#include "shared/telemetry/spans.h"

namespace ditfleet::kernel_cache {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kMaxWaitingStores = 64;
constexpr milliseconds kFilePollFirst{2}, kFilePollLast{50};
// Hundreds of nodes may wait for one: what they ask Redis meanwhile must not be felt there.
constexpr milliseconds kRedisPollFirst{20}, kRedisPollLast{250};
constexpr milliseconds kComplainAgainAfter{10'000};

}  // namespace

class KernelCache::Impl {
 public:
  explicit Impl(CacheOptions options)
      : options_(std::move(options)), memory_(options_.memory_bytes), background_(kMaxWaitingStores) {
    open_tiers();
    show_counters(disk_ != nullptr, redis_ != nullptr);
  }

  Result<Program> get_or_compile(const Key& key, std::string_view region, std::string_view arch, const Compile& compile,
                                 const Usable& usable) {
    telemetry::ScopedSpan span("kernel_cache_lookup");
    span.attribute("ditfleet.kernel_cache.key", key.hex());
    span.attribute("ditfleet.region", std::string(region));
    span.attribute("ditfleet.arch", std::string(arch));
    const char* source = "memory";
    Search search{key, region, arch, usable, nullptr, {}, {}};
    auto found = get_or_compile(search, compile, source);
    span.attribute("ditfleet.kernel_cache.source", std::string(source));
    if (!found) span.failed(found.error().message);
    return found;
  }

  Result<Program> find(const Key& key, std::string_view arch) {
    const Usable as_it_is;
    Search search{key, "", arch, as_it_is, nullptr, {}, {}};
    if (Program program = from_memory(search, true)) return program;
    Name on_disk = Name::kShared;
    if (Program program = from_disk(search, on_disk, true)) return program;
    RedisView view;
    if (Program program = from_redis(search, view)) {
      keep_redis_hit(search, on_disk, std::move(view), nullptr);
      return program;
    }
    return Error{Code::kNotFound, "no tier of the kernel cache has " + key.hex(), {}};
  }

  void flush() { background_.flush(); }

  CacheCounts counts() const { return {memory_hits_, disk_hits_, redis_hits_, compiles_, failed_compiles_, refused_}; }

 private:
  struct Search {
    const Key& key;
    std::string_view region, arch;
    const Usable& usable;
    // What verified and cannot be used. A second look passes it over.
    Program unusable_in_memory;
    std::string unusable_on_disk;
    std::string refused_on_disk;  // what did not verify and could not be moved away; the same
  };

  void open_tiers() {
    if (!options_.secret) return;
    if (!options_.dir.empty() && options_.disk_bytes > 0)
      disk_ = std::make_unique<DiskTier>(options_.dir, options_.disk_bytes, options_.secret->id_text());
    if (options_.redis) {
      redis_ = std::make_unique<RedisTier>(RedisTierOptions{*options_.redis, options_.secret->id_text(),
                                                            options_.redis_timeout, options_.redis_ttl, options_.lock});
    }
  }

  // `source`: memory, disk, redis, compiled, or another_thread.
  Result<Program> get_or_compile(Search& search, const Compile& compile, const char*& source) {
    if (Program program = from_memory(search, true)) return program;
    auto [leader, outcome] = flights_.join(search.key);
    if (outcome) {
      source = "another_thread";
      return *outcome;
    }
    // Another may have landed between our look and our start.
    Program program = from_memory(search, false);
    Result<Program> brought = program ? Result<Program>(std::move(program)) : bring(search, compile, source);
    leader->land(brought);
    return brought;
  }

  // Where this node's value of a key is, or will be, in Redis.
  struct RedisView {
    Name name = Name::kShared;
    bool replace = false;   // what is there did not verify, and is under a name where it should; or it cannot be used
    bool unusable = false;  // the latter
    bool usable = true;     // false after a failure: the rest of this search does without Redis
    bool full = false;      // it takes nothing in
    std::string refused;    // bytes that have been judged already
    std::string refused_head;  // of a value in chunks, what says where these bytes were
    std::string good;          // bytes that have verified
  };

  // The locks under which one program is compiled; given up at the end, whatever that is.
  struct Held {
    explicit Held(Impl& impl) : owner(impl) {}
    Held(const Held&) = delete;
    ~Held() {
      if (fleet) owner.background_.add([&impl = owner, lock = std::move(fleet)] { impl.redis_->release(lock); });
    }
    Impl& owner;
    std::shared_ptr<FileLock> host = std::make_shared<FileLock>();
    std::shared_ptr<RedisTier::Lock> fleet;
  };

  Result<Program> bring(Search& search, const Compile& compile, const char*& source) {
    const Deadline deadline = Deadline::after(options_.wait);
    source = "disk";
    Name on_disk = Name::kShared;
    if (Program program = from_disk(search, on_disk, true)) return program;
    Held held(*this);
    if (Program program = take_host_lock(search, on_disk, deadline, held)) return program;
    source = "redis";
    RedisView view;
    Program program = from_redis(search, view);
    if (!program) program = take_fleet_lock(search, deadline, view, held);
    if (program) {
      keep_redis_hit(search, on_disk, std::move(view), held.host);
      return program;
    }
    source = "compiled";
    auto made = compile();
    ++(made ? compiles_ : failed_compiles_);
    count_compile(made ? "ok" : "error");
    if (!made) return made.error();
    if (made->arch != search.arch) {
      return internal_error("[kernel_cache] the compiler made a program for '" + made->arch + "', asked for was '" +
                            std::string(search.arch) + "'");
    }
    program = std::make_shared<const Entry>(std::move(*made));
    if (search.usable)
      if (auto used = search.usable(*program); !used) return used.error();
    memory_.put(search.key, program);
    store(search, program, on_disk, std::move(view), held);
    return program;
  }

  // Whether who asks can use what has verified; where not, that is counted and logged.
  bool can_use(const Search& search, const Entry& entry, std::string_view tier) {
    if (!search.usable) return true;
    const auto used = search.usable(entry);
    if (!used) refuse(search, tier, {Refusal::kUnusable, used.error().message}, false);
    return used.ok();
  }

  Program from_memory(Search& search, bool count) {
    Program program = memory_.find(search.key);
    if (program && program->arch != search.arch) {
      count_lookup("memory", refusal_name(Refusal::kWrongArch));
      ++refused_;
      memory_.erase(search.key);
      return nullptr;
    }
    if (program && program == search.unusable_in_memory) return nullptr;
    if (program && !can_use(search, *program, "memory")) {
      search.unusable_in_memory = std::move(program);
      return nullptr;
    }
    if (program) ++memory_hits_;
    if (program || count) count_lookup("memory", program ? "hit" : "miss");
    return program;
  }

  // Takes it into memory. A second look at the same place (`first` false) counts only what it finds. `name`: where this
  // node's value is, or will be; as in Redis (judge()) another secret's value is left alone, and this node looks and
  // writes beside it.
  Program from_disk(Search& search, Name& name, bool first) {
    if (!disk_) return nullptr;
    auto bytes = disk_->read(search.key, name);
    if (bytes && !*bytes && name == Name::kShared) {
      auto beside = disk_->read(search.key, Name::kOwn);  // what it was put beside may have gone since
      if (!beside || *beside) {
        name = Name::kOwn;
        bytes = std::move(beside);
      }
    }
    if (!bytes) {
      if (bytes.error().code == Code::kDataCorrupt) {
        refuse(search, "disk", {Refusal::kCorrupt, bytes.error().message},
               disk_->quarantine(search.key, name, refusal_name(Refusal::kCorrupt)));
      } else if (first) {
        count_lookup("disk", "error");
        complain(disk_complaint_, bytes.error());
      }
      return nullptr;
    }
    if (!*bytes) {
      if (first) count_lookup("disk", "miss");
      return nullptr;
    }
    for (const std::string* known : {&search.unusable_on_disk, &search.refused_on_disk})
      if (!known->empty() && **bytes == *known) return nullptr;
    auto entry = decode(**bytes, search.key, search.arch, *options_.secret);
    if (!entry && entry.refused().why == Refusal::kForeignSecret && name == Name::kShared) {
      refuse(search, "disk", entry.refused(), false);
      name = Name::kOwn;
      return from_disk(search, name, first);
    }
    if (!entry) {
      const bool moved = disk_->quarantine(search.key, name, refusal_name(entry.refused().why));
      refuse(search, "disk", entry.refused(), moved);
      if (!moved) search.refused_on_disk = std::move(**bytes);
      return nullptr;
    }
    auto program = std::make_shared<const Entry>(std::move(*entry));
    if (!can_use(search, *program, "disk")) {
      search.unusable_on_disk = std::move(**bytes);
      return nullptr;
    }
    search.unusable_on_disk.clear();  // another process has replaced it
    count_lookup("disk", "hit");
    ++disk_hits_;
    disk_->used(search.key, name);
    memory_.put(search.key, program);
    if (first) publish_again(search.key, std::move(**bytes));
    return program;
  }

  // A Redis that has lost its data gets back what this node has on disk: one short question a program that was read
  // from there, in the background and only so often. What it has is marked as used.
  void publish_again(const Key& key, std::string bytes) {
    if (!redis_ || !allowance_.take(Deadline::Clock::now())) return;
    background_.offer([this, key, bytes = std::move(bytes)] {
      RedisView view;
      auto there = redis_->refresh(key, view.name);
      if (there && *there == RedisTier::There::kOfAnotherSecret) there = redis_->refresh(key, view.name = Name::kOwn);
      if (there && *there == RedisTier::There::kNothing) write_redis(key, bytes, view);
    });
  }

  Program from_redis(const Search& search, RedisView& view) {
    if (!redis_) {
      view.usable = false;
      return nullptr;
    }
    return judge(search, view, redis_->find(search.key, view.name), true);
  }

  // What Redis answered. Under the name that all share another secret's value may stand: it is left alone, and this
  // node looks under, and stores under, a name of its own secret.
  Program judge(const Search& search, RedisView& view, Result<std::optional<RedisTier::Value>> found, bool first) {
    if (!found) {
      const bool left_out = redis_->breaker_state() != Breaker::State::kClosed;
      count_lookup("redis", left_out ? "left_out" : "error");
      if (!left_out) complain(redis_complaint_, found.error());
      view.usable = false;
      return nullptr;
    }
    if (!*found) {
      if (first) count_lookup("redis", "miss");
      return nullptr;
    }
    std::string& bytes = (*found)->bytes;
    if (view.replace && bytes == view.refused) return nullptr;
    auto entry = decode(bytes, search.key, search.arch, *options_.secret);
    view.unusable = entry.ok();
    if (entry) {
      auto program = std::make_shared<const Entry>(std::move(*entry));
      if (can_use(search, *program, "redis")) {
        count_lookup("redis", "hit");
        ++redis_hits_;
        memory_.put(search.key, program);
        view.good = std::move(bytes);
        return program;
      }
    } else {
      const bool foreign = entry.refused().why == Refusal::kForeignSecret && view.name == Name::kShared;
      refuse(search, "redis", entry.refused(),
             !foreign && disk_ && disk_->quarantine(search.key, "redis", refusal_name(entry.refused().why), bytes));
      if (foreign) {
        view.name = Name::kOwn;
        return judge(search, view, redis_->fetch(search.key, view.name), first);
      }
    }
    view.replace = true;
    view.refused = std::move(bytes);
    view.refused_head = std::move((*found)->head);
    return nullptr;
  }

  // One process of this host at a time; the others wait, and find on disk what it brought.
  Program take_host_lock(Search& search, Name& on_disk, Deadline deadline, Held& held) {
    if (!disk_) return nullptr;
    Patience patience(kFilePollFirst, kFilePollLast);
    for (bool waited = false;; waited = true) {
      auto lock = disk_->try_lock(search.key);
      const bool busy = !lock && lock.error().code == Code::kConflict;
      if (busy && !deadline.passed()) {
        patience.wait(deadline);
        continue;
      }
      if (lock) *held.host = std::move(*lock);
      Program program = from_disk(search, on_disk, false);
      if (waited) count_wait(program ? "hit" : held.host->held() ? "took_over" : busy ? "timeout" : "error");
      return program;
    }
  }

  // One process of the fleet at a time.
  Program take_fleet_lock(const Search& search, Deadline deadline, RedisView& view, Held& held) {
    Patience patience(kRedisPollFirst, kRedisPollLast);
    for (bool waited = false; view.usable; waited = true) {
      auto attempt = redis_->try_lock(search.key, view.name, view.refused_head);
      Program program;
      if (!attempt && attempt.error().code == Code::kResourceExhausted) {
        // It takes in nothing now, no lock and no program.
        count_store("redis", "full");
        complain(redis_complaint_, attempt.error());
        view.usable = false;
        view.full = true;
      } else if (!attempt) {
        (void)judge(search, view, attempt.error(), false);
      } else {
        held.fleet = std::move(attempt->lock);
        if (attempt->value) program = judge(search, view, std::move(attempt->value), false);
      }
      const bool over = deadline.passed();
      if (waited && (program || held.fleet || over || !view.usable))
        count_wait(program ? "hit" : held.fleet ? "took_over" : over ? "timeout" : "error");
      if (program || held.fleet || over) return program;
      if (view.usable) patience.wait(deadline);
    }
    return nullptr;
  }

  void keep_redis_hit(const Search& search, Name on_disk, RedisView view, const std::shared_ptr<FileLock>& host) {
    background_.add(
        [this, key = search.key, on_disk, unusable = !search.unusable_on_disk.empty(), view = std::move(view), host] {
          if (unusable) set_aside_on_disk(key, on_disk);
          if (disk_) write_disk(key, on_disk, view.good);
          if (host) *host = FileLock();
          (void)redis_->refresh(key, view.name);  // else it expires sooner
        });
  }

  // The locks go once there is something to be found without them.
  void store(const Search& search, Program program, Name on_disk, RedisView view, Held& held) {
    background_.add([this, key = search.key, on_disk, unusable = !search.unusable_on_disk.empty(),
                     program = std::move(program), view = std::move(view), host = std::move(held.host),
                     fleet = std::move(held.fleet)] {
      if (!disk_ && !redis_) return;
      if (unusable) set_aside_on_disk(key, on_disk);
      if (view.unusable && disk_ && disk_->quarantine(key, "redis", refusal_name(Refusal::kUnusable), view.refused))
        count_quarantined("redis", refusal_name(Refusal::kUnusable));
      const auto bytes = encode(*program, key, *options_.secret);
      if (!bytes) {
        spdlog::warn("kernel cache: a program is not kept: {}", bytes.error().message);
      } else {
        if (disk_ && write_disk(key, on_disk, *bytes)) *host = FileLock();
        if (redis_ && !view.full) write_redis(key, *bytes, view);  // the compiler took its time: Redis may be back
      }
      *host = FileLock();
      if (fleet) redis_->release(fleet);
    });
    held.host = std::make_shared<FileLock>();
  }

  // What cannot be used goes once there is what can be: where that is not to be had, nobody knows whose fault it is.
  void set_aside_on_disk(const Key& key, Name name) {
    if (disk_->quarantine(key, name, refusal_name(Refusal::kUnusable)))
      count_quarantined("disk", refusal_name(Refusal::kUnusable));
  }

  bool write_disk(const Key& key, Name name, std::string_view bytes) {
    const auto written = disk_->write(key, bytes, name);
    count_store("disk", written ? "stored" : "error");
    if (!written) complain(disk_complaint_, written.error());
    return written.ok();
  }

  void write_redis(const Key& key, std::string_view bytes, const RedisView& view) {
    const auto stored = redis_->store(key, view.name, bytes, view.replace);
    if (stored) {
      count_store("redis", *stored == RedisTier::Stored::kNow ? "stored" : "already");
      return;
    }
    const bool left_out = redis_->breaker_state() == Breaker::State::kOpen;
    count_store("redis", stored.error().code == Code::kResourceExhausted ? "full" : left_out ? "left_out" : "error");
    if (!left_out) complain(redis_complaint_, stored.error());
  }

  void refuse(const Search& search, std::string_view tier, const Refused& refused, bool quarantined) {
    ++refused_;
    count_lookup(tier, refusal_name(refused.why));
    if (quarantined) count_quarantined(tier, refusal_name(refused.why));
    spdlog::warn("kernel cache: the program {} ({}, {}) from {} is not used: {}: {}", search.key.hex(),
                 search.region.empty() ? "?" : search.region, search.arch, tier, refusal_name(refused.why),
                 refused.message);
  }

  // At most now and then: a disk that is full is full for every program.
  void complain(std::atomic<std::int64_t>& last, const Error& error) {
    const auto now = std::chrono::duration_cast<milliseconds>(Deadline::Clock::now().time_since_epoch()).count();
    auto before = last.load();
    if (before != 0 && now - before < kComplainAgainAfter.count()) return;
    if (last.compare_exchange_strong(before, now)) spdlog::warn("kernel cache: {}", error.message);
  }

  const CacheOptions options_;
  MemoryTier memory_;
  std::unique_ptr<DiskTier> disk_;
  std::unique_ptr<RedisTier> redis_;
  Flights flights_;
  Allowance allowance_{64, 8};  // programs published again
  std::atomic<std::uint64_t> memory_hits_{0}, disk_hits_{0}, redis_hits_{0}, compiles_{0}, failed_compiles_{0},
      refused_{0};
  std::atomic<std::int64_t> disk_complaint_{0}, redis_complaint_{0};
  Background background_;  // last: ends before what its tasks use
};

KernelCache::KernelCache(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
KernelCache::~KernelCache() = default;

std::unique_ptr<KernelCache> KernelCache::create(CacheOptions options) {
  return std::unique_ptr<KernelCache>(new KernelCache(std::make_unique<Impl>(std::move(options))));
}

Result<KernelCache::Program> KernelCache::get_or_compile(const Key& key, std::string_view region, std::string_view arch,
                                                         const Compile& compile, const Usable& usable) {
  return impl_->get_or_compile(key, region, arch, compile, usable);
}

Result<KernelCache::Program> KernelCache::find(const Key& key, std::string_view arch) { return impl_->find(key, arch); }
void KernelCache::flush() { impl_->flush(); }
CacheCounts KernelCache::counts() const { return impl_->counts(); }

}  // namespace ditfleet::kernel_cache
