// Tracks which adapters each worker holds in host memory and in slots. Predicts what a unit would wait for on each
// worker. Updated from the worker registry and, before workers report, from the scheduler's own assignments, which make
// a worker load adapters. Also tracks the demand for each adapter and chooses which adapter a full worker evicts.
//
// No I/O, no clock; not thread-safe. Times are microseconds of Redis' clock.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "coordinator/scheduling/placement/cost_model.h"
#include "coordinator/scheduling/placement/dense.h"
#include "shared/queue/types.h"

namespace ditfleet::scheduling {

using AdapterId = std::uint32_t;

// Used until a worker reports measurements: a load rate of 1 GB/s, and swap time and size of a rank-16 adapter on all
// linear layers of a 12-billion-parameter transformer, H200 (tests/bench/results/lora_gpu.csv).
inline constexpr double kPriorLoadBytesPerSecond = 1e9;
inline constexpr std::int64_t kPriorSwapUs = 3'600;
inline constexpr std::int64_t kPriorAdapterBytes = 172'000'000;

// What a unit with adapters would wait for on one worker. Loads and swaps overlap the unit that runs on the worker.
struct AdapterNeed {
  std::int64_t ready_us = 0;  // when all adapters are in slots; now or earlier if they already are
  std::int64_t load_us = 0;   // from source to host memory, of adapters that are neither there nor being loaded
  std::int64_t swap_us = 0;   // from host memory to slots, of adapters that are in no slot
};

enum class Eviction {
  kLeastRecentlyUsed,
  kLeastWorth,  // demand × size ÷ number of holders
};

class Residency {
  struct Place {  // what scan() reads of a copy
    WorkerId worker = 0;
    bool in_slot = false;
    std::int64_t ready_us = 0;
  };

 public:
  // The id stays valid until prune() forgets the adapter.
  AdapterId intern(const std::string& name);
  const std::string& name(AdapterId a) const { return adapters_[a].name; }
  std::size_t known() const { return ids_.size(); }
  // The size as registered. forget_sizes() makes all sizes unknown; their last values stay in use.
  void set_size(AdapterId a, std::int64_t bytes);
  void forget_sizes();
  // Counts users of the id outside this class.
  void refer(AdapterId a) { ++adapters_[a].referred; }
  void unrefer(AdapterId a) { --adapters_[a].referred; }
  // If there are many adapters, forgets those that are not held, not referred to, not pinned and of unknown size. Their
  // ids are reused.
  void prune();
  // A pinned adapter is never evicted.
  void pin(AdapterId a, bool pinned) { adapters_[a].pinned = pinned; }
  // Counts a unit that needs the adapter.
  void asked_for(AdapterId a, std::int64_t now_us);
  // Requests per second, over the last minutes.
  double demand(AdapterId a, std::int64_t now_us) const;

  // Replaces the state of the worker by its report. Keeps adapters that its held units need and that it does not report
  // yet. A worker without slots accepts no unit with adapters. A load rate or swap time of 0 was not measured yet.
  void report(WorkerId w, const queue::WorkerInfo& info, std::int64_t now_us);
  void forget(WorkerId w);

  int slots(WorkerId w) const { return peek(workers_, w).slots; }
  std::size_t held_count(WorkerId w) const { return peek(workers_, w).copies.size(); }
  bool has_spare_slot(WorkerId w) const;
  // How many of these adapters the worker has reported neither in host memory nor in a slot.
  std::size_t unreported(WorkerId w, std::span<const AdapterId> adapters) const;
  bool is_held(AdapterId a) const { return !adapters_[a].places.empty(); }

  // The worker gets a unit that needs these adapters. Predicts the worker's loads, and returns the adapters to evict
  // from host memory and those to evict from slots only.
  struct Dropped {
    std::vector<AdapterId> from_host, from_slots;
  };
  Dropped hold(WorkerId w, std::span<const AdapterId> adapters, Eviction eviction, std::int64_t now_us);
  // The worker no longer holds the unit.
  void release(WorkerId w, std::span<const AdapterId> adapters);

  // The needs of one unit on any worker. Valid until the next call of scan().
  class Scan {
   public:
    bool any() const { return count_ > 0; }
    bool fits(WorkerId w) const { return count_ == 0 || owner_->slots(w) >= count_; }
    // Calls `use` for each worker on which every adapter of the unit is loaded or being loaded. If the unit needs no
    // adapter, calls it for no worker.
    template <class Use>
    void for_holders(Use use) const {
      for (const auto& place : first_) {
        if (owner_->found_[place.worker].here == count_) use(place.worker);
      }
    }
    AdapterNeed at(WorkerId w) const;

   private:
    friend class Residency;
    const Residency* owner_ = nullptr;
    int count_ = 0;
    std::int64_t bytes_ = 0, now_us_ = 0;
    std::span<const Place> first_;  // of the first adapter
  };
  Scan scan(std::span<const AdapterId> adapters, std::int64_t now_us) const;

 private:
  struct Adapter {
    std::string name;
    std::int64_t bytes = kPriorAdapterBytes;
    bool sized = false, pinned = false;
    int referred = 0;
    double asked = 0;  // decayed count
    std::int64_t asked_us = 0;
    std::vector<Place> places;
  };
  struct Copy {
    AdapterId adapter = 0;
    bool in_slot = false;
    bool reported = false;  // false: being loaded
    int units = 0;          // held by the worker that need it
    std::int64_t ready_us = 0, used_us = 0;
  };
  struct Holder {
    int slots = 0;
    std::int64_t host_bytes = 0, used_bytes = 0;
    double load_us_per_byte = 1e6 / kPriorLoadBytesPerSecond;
    std::int64_t swap_us = kPriorSwapUs;
    std::int64_t loader_free_us = 0;  // when its loads are done
    std::vector<Copy> copies;
  };
  struct Found {  // scratch of scan()
    std::uint32_t scan = 0;
    int here = 0, in_slots = 0;
    std::int64_t bytes = 0, ready_us = 0;
  };
  Copy* find(Holder& holder, AdapterId a);
  double worth(const Copy& copy, std::int64_t now_us) const;
  std::int64_t load_us(const Holder& holder, std::int64_t bytes) const;
  void add_place(WorkerId w, const Copy& copy) {
    adapters_[copy.adapter].places.push_back({w, copy.in_slot, copy.ready_us});
  }
  void update_place(WorkerId w, const Copy& copy);
  void remove_place(WorkerId w, AdapterId a);

  std::vector<Adapter> adapters_;
  std::unordered_map<std::string, AdapterId> ids_;
  std::vector<AdapterId> free_;
  std::size_t prune_from_ = 1024;  // known adapters
  std::vector<Holder> workers_;
  mutable std::vector<Found> found_;
  mutable std::uint32_t scans_ = 0;
};

}  // namespace ditfleet::scheduling
