// A model's adapters, in host memory and in slots on its device.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "pipeline/api/adapters.h"
#include "pipeline/lora/packed.h"
#include "pipeline/nn/linear.h"

namespace ditfleet::pipeline {

// An adapter on the device. Its slot stays occupied as long as this object exists.
struct Adapter {
  struct Term {
    std::size_t component, slot;  // indices in LoraBase
    LowRank low_rank;             // with the file's scale and strength 1
  };
  std::uint64_t id;  // of this content; a changed file gets a new id
  std::vector<Term> terms;
  bool changes_text;  // has terms for a text encoder
  struct Bias {
    std::size_t component, slot;
    BiasChange change;  // with scale 1
  };
  std::vector<Bias> biases = {};
  std::string unused = {};  // lists tensors of the file that are left out; empty: none
};

// Describes linears for LoraBase. BaseLinear::slot is the index of the first linear of that matrix in `linears`.
std::vector<BaseLinear> base_linears(const std::vector<NamedLinear>& linears);

// Adds an adapter's terms and bias changes, times `strength`, to the linears of each component (by index in LoraBase).
// Terms get the type of a weight that has another than the adapter. Throws Failure (kInvalidArgument) if the scale
// overflows fp32.
void add_adapter(const Adapter& adapter, double strength, std::span<const std::vector<NamedLinear>> linears);

// Reads the adapter files of one model, caches them in host memory and copies them into slots. A slot is device memory
// that is large enough for any adapter, allocated on first use and never freed; a new adapter overwrites all of it.
// Adapters that the caller lists are evicted first, then the least recently used ones. A pinned adapter is never
// evicted from host memory, and from its slot only if no other slot is available. Thread-safe. Resident adapters are
// returned immediately; files are read and copied one at a time.
class AdapterStore {
 public:
  struct Limits {
    std::int64_t max_rank;  // that every linear may have in a slot
    int slots;
    std::int64_t host_bytes;
  };
  AdapterStore(LoraBase base, Placement placement, Limits limits);

  // Returns the adapter in a slot. If all slots are in use, it gets separate memory, which is freed with the adapter.
  // The calling thread must be in a StageScope. Throws Failure for the errors of read_lora_file(), and LibTorch's
  // exceptions when memory runs out.
  std::shared_ptr<const Adapter> get(const LoraRequest& request);
  // Loads the adapter into host memory, and into a slot if one is free. Evicts `drops` first if needed. Throws as get()
  // does.
  void prefetch(const LoraRequest& request, const AdapterDrops& drops);

  void pin(const std::set<std::string>& ids);  // replaces the set of pinned adapters

  // Evicts the adapter and overwrites its slot. The calling thread must be in a StageScope.
  void forget(const std::string& id);
  std::int64_t slot_bytes() const;  // of all slots, whether or not they have been used
  std::int64_t unallocated_slot_bytes() const;
  AdapterHoldings holdings() const;

 private:
  // Identifies an adapter.
  struct Name {
    std::string key;  // the id if given, else path, size, time and inode
    std::string id;   // the caller's; may be empty
  };
  struct Kept {
    Name name;
    std::uint64_t number;
    std::shared_ptr<const PackedAdapter> packed;
  };
  struct Slot {
    at::Tensor memory;  // undefined until first used
    Name name;
    std::shared_ptr<const Adapter> adapter;  // null: empty
    std::uint64_t used = 0;                  // time of the last use, by clock_
  };
  static Name name_of(const LoraRequest& request);
  std::int64_t bytes_of(std::int64_t slots) const;
  std::shared_ptr<const Adapter> find_in_slot(const Name& name);
  Kept in_host(const LoraRequest& request, const Name& name, const AdapterDrops& drops);
  bool reserve(std::int64_t bytes, const std::vector<std::string>& drop_first);  // under mutex_
  Slot* choose_slot(const AdapterDrops& drops);
  std::shared_ptr<const Adapter> copy(const Kept& kept, const at::Tensor& memory) const;
  std::shared_ptr<const Adapter> into_slot(const Kept& kept, const AdapterDrops& drops);

  const LoraNames names_;
  const Placement placement_;
  const Limits limits_;
  const std::int64_t slot_elements_;
  std::mutex loading_;        // held while reading or copying
  mutable std::mutex mutex_;  // guards the following members; never held for long
  std::vector<Slot> slots_;
  std::list<Kept> host_;  // most recently used first
  std::set<std::string> pinned_;
  std::uint64_t clock_ = 0, next_number_ = 1;
  std::int64_t load_bytes_per_s_ = 0, swap_us_ = 0;
};

}  // namespace ditfleet::pipeline
