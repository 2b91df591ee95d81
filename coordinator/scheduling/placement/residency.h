// Which adapters each worker holds, in host memory and, of those, in slots; and so what a unit that needs some
// would wait for there. Fed by the registry, and ahead of it by the scheduler's own assignments, which make a
// worker load what it lacks. Knows how much each adapter is asked for: where room is short, what is worth least
// goes, which is what is seldom asked for or held by many.
//
// Pure and not thread safe. Times are microseconds of Redis' clock.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "coordinator/scheduling/placement/cost_model.h"

namespace ditfleet::scheduling {

using AdapterId = std::uint32_t;

// Until a worker has measured its own: 1 GB/s from the source; a swap and a size as of an adapter of rank 16 of a model
// of 12 billion parameters on an H200 (tests/bench/results/lora_h200.csv).
inline constexpr double kPriorLoadBytesPerSecond = 1e9;
inline constexpr std::int64_t kPriorSwapUs = 3'600;
inline constexpr std::int64_t kPriorAdapterBytes = 172'000'000;

// What a unit with adapters would wait for on one worker.
struct AdapterNeed {
  // When all are in slots; not after now if they are. Loads and swaps run beside the job in hand.
  std::int64_t ready_us = 0;
  std::int64_t load_us = 0;  // source → host of what is not there and not on its way
  std::int64_t swap_us = 0;  // host → slot of what is in none
  // How much is lost by what a load pushes out: 1 for the last copy of an adapter, nearly 0 for one of many, which
  // hardly anybody will miss; 0 if there is room.
  double scarcity = 0;
};

// What a worker says of itself.
struct HeldAdapters {
  int slots = 0;                // 0: it takes no unit with adapters
  std::int64_t host_bytes = 0;  // room in host memory
  double load_bytes_per_s = 0;  // measured; 0: not yet
  std::int64_t swap_us = 0;     // measured; 0: not yet
  std::vector<AdapterId> in_slots, in_host;
};

enum class Eviction {
  kLeastRecentlyUsed,
  kLeastWorth,  // how often it is asked for, times what loading it costs, over its holders (of many even less: one will
                // be idle)
};

class Residency {
  struct Place {  // what scan() reads of a copy, together with all others of the adapter
    WorkerId worker = 0;
    bool in_slot = false;
    std::int64_t ready_us = 0;
  };

 public:
  // An adapter is known from here on until prune() forgets it.
  AdapterId intern(const std::string& name);
  const std::string& name(AdapterId a) const { return adapters_[a].name; }
  std::size_t known() const { return ids_.size(); }
  // Its size is known, as of those that are registered; and of none is it any more, until told anew.
  void set_size(AdapterId a, std::int64_t bytes);
  void forget_sizes();
  // Somebody outside remembers the id.
  void refer(AdapterId a) { ++adapters_[a].referred; }
  void unrefer(AdapterId a) { --adapters_[a].referred; }
  // Forgets adapters that nobody holds, refers to, has pinned or told the size of, once there may be many of them:
  // their ids will stand for others.
  void prune();
  // A pinned adapter is never evicted from where it is.
  void pin(AdapterId a, bool pinned) { adapters_[a].pinned = pinned; }
  // A unit asks for it.
  void asked_for(AdapterId a, std::int64_t now_us);
  // Requests a second, over the last minutes.
  double demand(AdapterId a, std::int64_t now_us) const;

  // Replaces what is known of the worker; what it was made to load and has not mentioned yet stays.
  void report(WorkerId w, const HeldAdapters& held, std::int64_t now_us);
  void forget(WorkerId w);

  int slots(WorkerId w) const { return w < workers_.size() ? workers_[w].slots : 0; }
  std::size_t held_count(WorkerId w) const { return w < workers_.size() ? workers_[w].copies.size() : 0; }
  bool has_spare_slot(WorkerId w) const;
  // All of these are in its host memory or on their way there.
  bool has(WorkerId w, std::span<const AdapterId> adapters) const;
  // How many of these the worker has not said yet that it has, in host memory or in a slot.
  std::size_t not_there(WorkerId w, std::span<const AdapterId> adapters) const;
  std::vector<WorkerId> holders(AdapterId a) const;
  bool is_held(AdapterId a) const { return !adapters_[a].places.empty(); }

  // Worth of the copy that would go first for want of room; 0 if there is room for another.
  double least_worth(WorkerId w) const { return w < workers_.size() ? workers_[w].least_worth : 0; }

  // The worker gets a unit that needs these: predicts what it loads and, for want of room, drops. Returns what
  // is dropped from host memory, and what from a slot alone.
  struct Dropped {
    std::vector<AdapterId> from_host, from_slots;
  };
  Dropped hold(WorkerId w, std::span<const AdapterId> adapters, Eviction eviction, std::int64_t now_us);
  // It is through with the unit, or does not run it after all.
  void release(WorkerId w, std::span<const AdapterId> adapters, std::int64_t now_us);

  // The needs of one unit, on any worker. Valid until the next call of scan().
  class Scan {
   public:
    bool any() const { return count_ > 0; }
    bool fits(WorkerId w) const { return count_ == 0 || owner_->slots(w) >= count_; }
    // Each worker that has, or is loading, all of them; none if there are none.
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
    std::span<const Place> first_;  // of the first of them
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
    bool told = false;  // the worker has it; else it is on its way
    int units = 0;      // that the worker holds and that need it
    std::int64_t ready_us = 0, used_us = 0;
  };
  struct Holder {
    int slots = 0;
    std::int64_t host_bytes = 0, used_bytes = 0;
    double load_us_per_byte = 1e6 / kPriorLoadBytesPerSecond;
    std::int64_t swap_us = kPriorSwapUs;
    std::int64_t loader_free_us = 0;       // when what it was made to load is there
    double least_worth = 0, scarcity = 0;  // of the copy that would go first
    std::vector<Copy> copies;
  };
  struct Found {  // scratch of scan()
    std::uint32_t scan = 0;
    int here = 0, in_slots = 0;
    std::int64_t bytes = 0, ready_us = 0;
  };
  Copy* find(Holder& holder, AdapterId a);
  double worth(const Copy& copy, std::int64_t now_us) const;
  void weigh(Holder& holder, std::int64_t now_us);
  std::int64_t load_us(const Holder& holder, std::int64_t bytes) const;
  void add_place(WorkerId w, const Copy& copy) {
    adapters_[copy.adapter].places.push_back({w, copy.in_slot, copy.ready_us});
  }
  void update_place(WorkerId w, const Copy& copy);
  void remove_place(WorkerId w, AdapterId a);

  std::vector<Adapter> adapters_;
  std::unordered_map<std::string, AdapterId> ids_;
  std::vector<AdapterId> free_;
  std::size_t prune_from_ = 1024;  // known ones; so that each is looked at a few times only
  std::vector<Holder> workers_;
  mutable std::vector<Found> found_;
  mutable std::uint32_t scans_ = 0;
};

}  // namespace ditfleet::scheduling
