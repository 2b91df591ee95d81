#include "pipeline/lora/adapter.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>

#include "pipeline/device/failure.h"
#include "pipeline/weights/safetensors.h"

namespace ditfleet::pipeline {
namespace {

std::int64_t microseconds_since(std::chrono::steady_clock::time_point begun) {
  return std::max<std::int64_t>(
      1, std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begun).count());
}

}  // namespace

std::vector<BaseLinear> base_linears(const std::vector<NamedLinear>& linears) {
  std::vector<BaseLinear> base;
  for (std::size_t i = 0; i < linears.size(); ++i) {
    const NamedLinear& l = linears[i];
    const bool next_rows = i > 0 && linears[i - 1].slot == l.slot;
    base.push_back({l.name, next_rows ? base.back().slot : i, l.first_row, l.slot->in(), l.rows});
  }
  return base;
}

void add_adapter(const Adapter& adapter, double strength, std::span<const std::vector<NamedLinear>> linears) {
  for (const Adapter::Term& term : adapter.terms) {
    LinearSlot& slot = *linears[term.component][term.slot].slot;
    LowRank low_rank = term.low_rank;
    low_rank.scale *= strength;
    if (!std::isfinite(static_cast<float>(low_rank.scale)))
      fail(Code::kInvalidArgument,
           "loras gives an adapter a scale of " + std::to_string(strength) +
               ", which multiplied by the adapter's scale (alpha / rank) overflows fp32",
           "loras");
    if (slot.weight.defined()) {
      low_rank.down = low_rank.down.to(slot.weight.scalar_type());
      low_rank.up = low_rank.up.to(slot.weight.scalar_type());
    }
    slot.low_rank.push_back(std::move(low_rank));
  }
  for (const Adapter::Bias& bias : adapter.biases)
    linears[bias.component][bias.slot].slot->bias_changes.push_back(
        {bias.change.values, bias.change.first_row, bias.change.scale * strength});
}

AdapterStore::AdapterStore(LoraBase base, Placement placement, Limits limits)
    : names_(std::move(base)),
      placement_(placement),
      limits_(limits),
      slot_elements_(most_packed_elements(names_.base(), limits.max_rank)),
      slots_(static_cast<std::size_t>(limits.slots)) {}

std::int64_t AdapterStore::bytes_of(std::int64_t slots) const {
  return slot_elements_ * static_cast<std::int64_t>(c10::elementSize(placement_.dtype)) * slots;
}

std::int64_t AdapterStore::slot_bytes() const { return bytes_of(limits_.slots); }

std::int64_t AdapterStore::unallocated_slot_bytes() const {
  std::lock_guard lock(mutex_);
  return bytes_of(std::count_if(slots_.begin(), slots_.end(), [](const Slot& s) { return !s.memory.defined(); }));
}

// Computed before the file is read, so that a file that changes meanwhile is read again next time.
AdapterStore::Name AdapterStore::name_of(const LoraRequest& request) {
  return {request.id.empty() ? "file:" + file_identity(request.path) : "id:" + request.id, request.id};
}

std::shared_ptr<const Adapter> AdapterStore::find_in_slot(const Name& name) {
  std::lock_guard lock(mutex_);
  for (Slot& slot : slots_)
    if (slot.adapter && slot.name.key == name.key) {
      slot.used = ++clock_;
      return slot.adapter;
    }
  return nullptr;
}

AdapterStore::Kept AdapterStore::in_host(const LoraRequest& request, const Name& name, const AdapterDrops& drops) {
  {
    std::lock_guard lock(mutex_);
    for (auto at = host_.begin(); at != host_.end(); ++at)
      if (at->name.key == name.key) {
        host_.splice(host_.begin(), host_, at);
        return *at;
      }
  }
  const auto begun = std::chrono::steady_clock::now();
  Kept kept{name, 0,
            read_packed_adapter(request.path, names_, std::max(limits_.max_rank, kMostAdapterRank), placement_)};
  const std::int64_t took = microseconds_since(begun);
  const auto mib = [](std::int64_t elements, const at::Tensor& of) {
    return std::to_string(elements * of.element_size() >> 20) + " MiB";
  };
  if (const at::Tensor& values = kept.packed->values; values.numel() > slot_elements_)
    fail(Code::kInvalidArgument,
         "[lora] " + request.path + ": it has a rank of up to " + std::to_string(kept.packed->rank()) + " and takes " +
             mib(values.numel(), values) + ", but a slot has " + mib(slot_elements_, values) +
             "; raise worker.lora.max_rank, which is " + std::to_string(limits_.max_rank) +
             ", the rank for which a slot has room at every layer",
         "loras");
  std::lock_guard lock(mutex_);
  load_bytes_per_s_ = kept.packed->bytes() * 1'000'000 / took;
  kept.number = next_number_++;
  if (reserve(kept.packed->bytes(), drops.from_host)) host_.push_front(kept);
  return kept;
}

// Evicts adapters until `bytes` are free. False, with nothing evicted, if pinned adapters leave too little.
bool AdapterStore::reserve(std::int64_t bytes, const std::vector<std::string>& drop_first) {
  std::int64_t free = limits_.host_bytes - bytes, droppable = 0;
  const auto may_go = [&](const Kept& kept) { return !pinned_.contains(kept.name.id); };
  for (const Kept& kept : host_) {
    free -= kept.packed->bytes();
    droppable += may_go(kept) ? kept.packed->bytes() : 0;
  }
  if (free + droppable < 0) return false;
  const auto drop = [&](std::list<Kept>::iterator at) {
    free += at->packed->bytes();
    return host_.erase(at);
  };
  for (const std::string& id : drop_first) {
    const auto at =
        std::find_if(host_.begin(), host_.end(), [&](const Kept& kept) { return kept.name.id == id && may_go(kept); });
    if (free < 0 && at != host_.end()) drop(at);
  }
  for (auto at = host_.end(); free < 0;)
    if (--at; may_go(*at)) at = drop(at);
  return true;
}

// In this order: an empty slot, one that the caller wants dropped, the least recently used, the least recently used
// pinned one. Never a slot in use.
AdapterStore::Slot* AdapterStore::choose_slot(const AdapterDrops& drops) {
  std::lock_guard lock(mutex_);
  std::vector<std::string> wanted = drops.from_host;
  wanted.insert(wanted.end(), drops.from_slots.begin(), drops.from_slots.end());
  const auto rank = [&](const Slot& slot) -> std::pair<int, std::uint64_t> {
    if (!slot.adapter) return {0, 0};
    if (pinned_.contains(slot.name.id)) return {3, slot.used};
    const auto at = std::find(wanted.begin(), wanted.end(), slot.name.id);
    return at != wanted.end() ? std::pair(1, static_cast<std::uint64_t>(at - wanted.begin())) : std::pair(2, slot.used);
  };
  Slot* best = nullptr;
  for (Slot& slot : slots_)
    if ((!slot.adapter || slot.adapter.use_count() == 1) && (!best || rank(slot) < rank(*best))) best = &slot;
  if (best) best->adapter = nullptr;  // it can no longer be found
  return best;
}

std::shared_ptr<const Adapter> AdapterStore::copy(const Kept& kept, const at::Tensor& memory) const {
  const PackedAdapter& packed = *kept.packed;
  memory.narrow(0, 0, packed.values.numel()).copy_(packed.values, /*non_blocking=*/true);
  memory.narrow(0, packed.values.numel(), memory.numel() - packed.values.numel()).zero_();
  auto adapter = std::make_shared<Adapter>(Adapter{kept.number, {}, packed.changes_text, {}, packed.unused});
  for (const auto& term : packed.terms) {
    const at::Tensor down = memory.narrow(0, term.down_at, term.rank * term.in).view({term.rank, term.in});
    const at::Tensor up = memory.narrow(0, term.up_at, term.rows * term.rank).view({term.rows, term.rank});
    adapter->terms.push_back({term.component, term.slot, {down, up, term.first_row, term.scale}});
  }
  for (const auto& bias : packed.biases)
    adapter->biases.push_back(
        {bias.component, bias.slot, {memory.narrow(0, bias.at, bias.rows), bias.first_row, bias.scale}});
  synchronize_current(placement_.device);
  return adapter;
}

std::shared_ptr<const Adapter> AdapterStore::into_slot(const Kept& kept, const AdapterDrops& drops) {
  Slot* slot = choose_slot(drops);
  if (!slot) return nullptr;
  const auto options = at::TensorOptions(placement_.dtype).device(placement_.device);
  at::Tensor memory = slot->memory;
  if (!memory.defined()) memory = at::empty({slot_elements_}, options);
  const auto begun = std::chrono::steady_clock::now();
  auto adapter = copy(kept, memory);
  const std::int64_t took = microseconds_since(begun);
  std::lock_guard lock(mutex_);
  slot->memory = std::move(memory);
  swap_us_ = took;
  slot->name = kept.name;
  slot->adapter = adapter;
  slot->used = ++clock_;
  return adapter;
}

std::shared_ptr<const Adapter> AdapterStore::get(const LoraRequest& request) {
  const Name name = name_of(request);
  if (auto found = find_in_slot(name)) return found;
  std::lock_guard loading(loading_);
  if (auto found = find_in_slot(name)) return found;
  const Kept kept = in_host(request, name, {});
  if (auto adapter = into_slot(kept, {})) return adapter;
  return copy(kept,
              at::empty({kept.packed->values.numel()}, at::TensorOptions(placement_.dtype).device(placement_.device)));
}

void AdapterStore::prefetch(const LoraRequest& request, const AdapterDrops& drops) {
  const Name name = name_of(request);
  if (find_in_slot(name)) return;
  std::lock_guard loading(loading_);
  if (!find_in_slot(name)) into_slot(in_host(request, name, drops), drops);
}

void AdapterStore::pin(const std::set<std::string>& ids) {
  std::lock_guard lock(mutex_);
  pinned_ = ids;
}

void AdapterStore::forget(const std::string& id) {
  std::lock_guard loading(loading_);
  std::vector<Slot*> unused;
  {
    std::lock_guard lock(mutex_);
    host_.remove_if([&](const Kept& kept) { return kept.name.id == id; });
    for (Slot& slot : slots_)
      if (slot.adapter && slot.name.id == id) {
        slot.name = {};  // cannot be found; if it is in use, the next adapter in the slot overwrites it
        if (slot.adapter.use_count() > 1) continue;
        slot.adapter = nullptr;
        unused.push_back(&slot);
      }
  }
  for (Slot* slot : unused) slot->memory.zero_();
}

AdapterHoldings AdapterStore::holdings() const {
  std::lock_guard lock(mutex_);
  AdapterHoldings out{.slots = limits_.slots,
                      .in_slots = {},
                      .in_host = {},
                      .host_bytes = limits_.host_bytes,
                      .load_bytes_per_s = load_bytes_per_s_,
                      .swap_us = swap_us_};
  std::map<std::uint64_t, std::string, std::greater<>> by_use;
  for (const Slot& slot : slots_)
    if (slot.adapter && !slot.name.id.empty()) by_use[slot.used] = slot.name.id;
  for (const auto& [used, id] : by_use) out.in_slots.push_back(id);
  for (const Kept& kept : host_)
    if (!kept.name.id.empty()) out.in_host.push_back(kept.name.id);
  return out;
}

}  // namespace ditfleet::pipeline
