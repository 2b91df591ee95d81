// A model's adapters: in host memory, and in the slots of its device.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "pipeline/api/adapters.h"
#include "pipeline/lora/packed.h"
#include "pipeline/nn/linear.h"

namespace ditfleet::pipeline {

// On the device, ready to be added to linears. Whoever holds one keeps its slot.
struct Adapter {
  struct Term {
    LoraPart part;
    std::size_t slot;  // as in the LoraBase
    LowRank low_rank;  // with the file's scale; strength 1
  };
  std::uint64_t id;  // of this content: another after the file has changed
  std::vector<Term> terms;
  bool changes_text;  // has terms for CLIP or T5
};

// Reads adapters' files for one model, keeps them in host memory as long as there is room, and brings them into slots:
// as many pieces of device memory, each large enough for any adapter, which are taken when first needed and kept for
// good. What a slot held is overwritten whole before another adapter is in it. Where room is short the least recently
// used goes, after those that the caller names; a pinned one leaves host memory never, its slot only if no other may be
// taken. Thread safe: what is there is given at once, files are read and copied one at a time.
class AdapterStore {
 public:
  struct Limits {
    std::int64_t max_rank;  // of one module
    int slots;
    std::int64_t host_bytes;
  };
  AdapterStore(const LoraBase& base, Placement placement, Limits limits);

  // Call them on a thread that is in a StageScope. Throws Failure as read_lora_file() fails, and LibTorch's own
  // exceptions when memory runs out. In a slot; where all slots are in use, in memory of its own, which is given back
  // with the adapter.
  std::shared_ptr<const Adapter> get(const LoraRequest& request);
  // The same ahead of time: into host memory, and into a slot if one is free, where `drops` make room first.
  void prefetch(const LoraRequest& request, const AdapterDrops& drops);

  void pin(const std::set<std::string>& ids);  // instead of those before

  // On a thread that is in a StageScope, too.
  void forget(const std::string& id);
  AdapterHoldings holdings() const;

 private:
  // By what an adapter is found.
  struct Name {
    std::string key;  // the id, or else path, size, time and inode
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
    std::shared_ptr<const Adapter> adapter;  // null: nothing
    std::uint64_t used = 0;                  // when, by clock_
  };
  static Name name_of(const LoraRequest& request);
  std::shared_ptr<const Adapter> find_in_slot(const Name& name);
  Kept in_host(const LoraRequest& request, const Name& name, const AdapterDrops& drops);
  bool make_room(std::int64_t bytes, const std::vector<std::string>& drop_first);  // under mutex_
  Slot* choose_slot(const AdapterDrops& drops);
  std::shared_ptr<const Adapter> copy(const Kept& kept, const at::Tensor& memory) const;
  std::shared_ptr<const Adapter> into_slot(const Kept& kept, const AdapterDrops& drops);

  const LoraNames names_;
  const Placement placement_;
  const Limits limits_;
  const std::int64_t slot_elements_;
  std::mutex loading_;        // held while something is read or copied
  mutable std::mutex mutex_;  // of what follows; never held for long
  std::vector<Slot> slots_;
  std::list<Kept> host_;  // most recently used first
  std::set<std::string> pinned_;
  std::uint64_t clock_ = 0, next_number_ = 1;
  std::int64_t load_bytes_per_s_ = 0, swap_us_ = 0;
};

}  // namespace ditfleet::pipeline
