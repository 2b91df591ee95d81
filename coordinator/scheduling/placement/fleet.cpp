#include "coordinator/scheduling/placement/fleet.h"

#include <algorithm>
#include <utility>

#include "coordinator/scheduling/placement/rendezvous_hash.h"

namespace ditfleet::scheduling {
namespace {

constexpr int kStrikes = 3;
constexpr std::int64_t kFirstBackoffUs = 5'000'000, kMostBackoffUs = 300'000'000;
// A unit is overdue when it runs for this many predicted runs, and at least for this time.
constexpr std::int64_t kOverdueRuns = 10, kOverdueUs = 60'000'000;
// From host memory to a device, until a worker has measured it: pinned memory on PCIe 4.
constexpr std::int64_t kPriorLoadBytesPerUs = 20'000;

bool is_overdue(const HeldUnit& unit, std::int64_t now_us) {
  return unit.started && now_us - unit.started_us > std::max(kOverdueUs, kOverdueRuns * unit.run_us);
}

// Counts one less at `before`, one more at `after`.
template <class Key>
void count(std::map<Key, std::size_t>& counts, Key before, bool left, Key after, bool entered) {
  if (left) {
    if (const auto it = counts.find(before); --it->second == 0) counts.erase(it);
  }
  if (entered) ++counts[after];
}

}  // namespace

std::string_view worker_state_name(WorkerState state) {
  static constexpr std::string_view kNames[] = {"starting", "ready",   "draining", "silent",
                                                "stuck",    "overdue", "probing",  "gone"};
  static_assert(std::size(kNames) == static_cast<std::size_t>(WorkerState::kGone) + 1);
  return kNames[static_cast<std::size_t>(state)];
}

std::string_view shape_key(std::string_view class_key) { return class_key.substr(0, class_key.rfind('/')); }

Fleet::Fleet(int lookahead, std::int64_t silent_after_us)
    : lookahead_(std::max(1, lookahead)), silent_after_us_(silent_after_us) {}

WorkerId Fleet::allocate(const std::string& name, const std::string& boot) {
  const auto id = take_id(workers_, free_);
  grown(loads_, id) = {};
  workers_[id] = {.name = name, .boot = boot, .owner = name + ":" + boot, .hash = rendezvous_hash(name)};
  by_owner_.emplace(workers_[id].owner, id);
  for (auto& warm : warm_) {
    if (id < warm.size()) warm[id] = 0;
  }
  return id;
}

WorkerId Fleet::intern_owner(const std::string& owner) {
  if (const auto it = by_owner_.find(owner); it != by_owner_.end()) return it->second;
  const auto at = owner.rfind(':');
  return allocate(owner.substr(0, at), at == std::string::npos ? "" : owner.substr(at + 1));
}

std::vector<WorkerId> Fleet::update(const std::vector<queue::WorkerInfo>& infos, std::int64_t now_us,
                                    const std::function<ModelId(const std::string&)>& model_of) {
  now_us_ = now_us;
  reports_memory_ = std::any_of(infos.begin(), infos.end(), [](const auto& info) { return !info.memory.empty(); });
  for (auto& worker : workers_) {
    worker.state = WorkerState::kGone;
    worker.memory.clear();
  }
  for (auto& ids : by_model_) ids.clear();
  for (auto& open : open_) open.clear();
  for (auto& slots : open_slots_) slots.clear();
  for (auto& pixels : open_pixels_) pixels.clear();
  for (auto& rooms : rooms_) rooms.clear();
  for (auto& load : loads_) load.capacity = 0;  // so that refresh_load() lists it again
  for (const auto& info : infos) {
    std::vector<ModelId> models;
    for (const auto& name : info.models) models.push_back(model_of(name));
    apply(info, std::move(models));
  }
  most_pixels_.assign(rooms_.size(), ModelRoom::kUnlimited);
  for (ModelId m = 0; m < rooms_.size(); ++m) {
    if (const auto w = roomiest(m)) most_pixels_[m] = rooms_[m][*w].max_pixels;
  }
  std::vector<WorkerId> freed;
  for (WorkerId id = 0; id < workers_.size(); ++id) {
    auto& worker = workers_[id];
    if (worker.owner.empty() || worker.state != WorkerState::kGone) continue;
    loads_[id] = {};
    if (!worker.held.empty()) continue;
    adapters_.forget(id);
    by_owner_.erase(worker.owner);
    worker = {};
    free_.push_back(id);
    freed.push_back(id);
  }
  return freed;
}

void Fleet::apply(const queue::WorkerInfo& info, std::vector<ModelId> models) {
  const auto id = intern_owner(info.owner());
  auto& worker = workers_[id];
  worker.capacity = std::clamp(info.capacity, 1, lookahead_);
  worker.gpus = info.gpus;
  worker.heartbeat_us = info.heartbeat_ms * 1000;
  worker.models = std::move(models);
  for (const auto m : worker.models) grown(by_model_, m).push_back(id);
  for (std::size_t i = 0; !info.memory.empty() && i < worker.models.size(); ++i) {
    const auto reported = info.memory.find(info.models[i]);
    const auto& memory =
        worker.memory.emplace_back(reported == info.memory.end() ? queue::ModelMemory{} : reported->second);
    auto& room = grown(grown(rooms_, worker.models[i]), id) = {};
    if (memory.limits.empty()) continue;
    room.max_pixels = 0;
    for (const auto& limit : memory.limits) room.max_pixels = std::max(room.max_pixels, limit.max_pixels);
  }
  if (worker.reported_warm != info.warm_classes) {
    worker.reported_warm = info.warm_classes;
    worker.warm.clear();
    for (const auto& key : info.warm_classes) worker.warm.emplace(shape_key(key));
  }
  refresh_warm(id);
  if (now_us_ - worker.heartbeat_us > silent_after_us_) {
    worker.state = WorkerState::kSilent;
  } else if (info.state == "ready") {
    const bool overdue = std::any_of(worker.held.begin(), worker.held.end(),
                                     [this](const HeldUnit& held) { return is_overdue(held, now_us_); });
    worker.state = overdue                 ? WorkerState::kOverdue
                   : worker.backoff_us > 0 ? WorkerState::kProbing
                                           : WorkerState::kReady;
  } else {
    worker.state = info.state == "draining" ? WorkerState::kDraining
                   : info.state == "stuck"  ? WorkerState::kStuck
                                            : WorkerState::kStarting;
  }
  adapters_.report(id, info, now_us_);
  refresh_load(id);
}

void Fleet::refresh_warm(WorkerId w) {
  const auto& worker = workers_[w];
  for (auto& warm : warm_) grown(warm, w) = 0;
  for (const auto& key : worker.warm) {
    const auto it = class_ids_.find(key);
    if (it == class_ids_.end()) continue;
    for (const auto c : it->second) warm_[c][w] = 1;
  }
  // By the time another unit of the class starts, the held one will have warmed the worker.
  for (const auto& held : worker.held) {
    if (held.cls < warm_.size()) warm_[held.cls][w] = 1;
  }
}

void Fleet::define_class(ClassId c, const std::string& class_key) {
  if (c >= warm_.size()) {
    warm_.resize(c + 1);
    class_keys_.resize(c + 1);
  }
  if (const auto it = class_ids_.find(class_keys_[c]); it != class_ids_.end()) {  // the class that had the id before
    std::erase(it->second, c);
    if (it->second.empty()) class_ids_.erase(it);
  }
  class_keys_[c] = shape_key(class_key);
  class_ids_[class_keys_[c]].push_back(c);
  warm_[c].assign(workers_.size(), 0);
  for (WorkerId w = 0; w < workers_.size(); ++w) warm_[c][w] = workers_[w].warm.contains(class_keys_[c]);
}

// Updates `loads_`, `open_`, `open_slots_`, `open_pixels_` and the load times in `rooms_`.
void Fleet::refresh_load(WorkerId w) {
  const auto& worker = workers_[w];
  auto& load = loads_[w];
  const bool takes = worker.state == WorkerState::kReady ||
                     (worker.state == WorkerState::kProbing && worker.held.empty() && !worker.rests(now_us_));
  const bool full = worker.reserved || (!worker.held.empty() && worker.held.front().exclusive);
  const bool was_open = load.ready && load.has_capacity();
  const auto was_free_at_us = load.free_at_us;
  const int had_slots = load.adapter_slots;
  std::int64_t free_at_us = 0, waiting_us = 0;
  for (const auto& unit : worker.held) {
    const auto from_us = unit.started ? unit.started_us : std::max(unit.assigned_us, unit.ready_us);
    free_at_us = std::max(free_at_us, from_us) + unit.run_us;
    if (!unit.started) waiting_us += unit.run_us;
  }
  load = {.free_at_us = free_at_us,
          .waiting_us = waiting_us,
          .hash = worker.hash,
          .held = static_cast<int>(worker.held.size()),
          .capacity = full ? static_cast<int>(worker.held.size()) : worker.capacity,
          .adapter_slots = adapters_.slots(w),
          .ready = takes && worker.heartbeat_us > worker.handed_back_us};
  refresh_model_loads(w);
  const bool is_open = load.ready && load.has_capacity();
  if (was_open == is_open && was_free_at_us == load.free_at_us && had_slots == load.adapter_slots) return;
  for (const auto m : worker.models) {
    auto& open = grown(open_, m);
    auto& slots = grown(open_slots_, m);
    const bool left = was_open && open.erase({was_free_at_us, w}) > 0;
    const bool entered = is_open && open.emplace(load.free_at_us, w).second;
    count(slots, had_slots, left, load.adapter_slots, entered);
    if (!reports_memory_) continue;
    const auto max_pixels = room(m, w).max_pixels;
    count(grown(open_pixels_, m), max_pixels, left, max_pixels, entered);
  }
}

// The next unit of a model finds the weights on the device if the unit before it is of the same model. Otherwise they
// must be there now and stay there: loading another model may evict them.
void Fleet::refresh_model_loads(WorkerId w) {
  const auto& worker = workers_[w];
  const auto last = worker.held.empty() ? nullptr : &worker.held.back();
  bool last_loads = false;
  for (std::size_t i = 0; last != nullptr && i < worker.memory.size(); ++i)
    last_loads |= worker.models[i] == last->model && !worker.memory[i].resident;
  for (std::size_t i = 0; i < worker.memory.size(); ++i) {
    const auto& memory = worker.memory[i];
    const bool stays = (last != nullptr && last->model == worker.models[i]) || (memory.resident && !last_loads);
    rooms_[worker.models[i]][w].load_us = stays                ? 0
                                          : memory.load_us > 0 ? memory.load_us
                                                               : memory.bytes / kPriorLoadBytesPerUs;
  }
}

void Fleet::hold(WorkerId w, HeldUnit unit) {
  if (unit.cls < warm_.size()) grown(warm_[unit.cls], w) = 1;
  workers_[w].held.push_back(std::move(unit));
  refresh_load(w);
}

void Fleet::release(WorkerId w, const queue::UnitRef& ref, std::int64_t now_us) {
  auto& worker = workers_[w];
  const auto it = std::find_if(worker.held.begin(), worker.held.end(), [&](const HeldUnit& h) { return h.ref == ref; });
  if (it == worker.held.end()) return;
  if (it->started) worker.last_end_us = std::max(worker.last_end_us, now_us);
  adapters_.release(w, it->adapters);
  // A unit that started has warmed the worker; the next heartbeat will report it.
  if (!it->started && it->cold && it->cls < warm_.size()) {
    const auto cls = it->cls;
    worker.held.erase(it);
    const bool another =
        std::any_of(worker.held.begin(), worker.held.end(), [&](const HeldUnit& h) { return h.cls == cls; });
    warm_[cls][w] = another || worker.warm.contains(class_keys_[cls]);
  } else {
    worker.held.erase(it);
  }
  refresh_load(w);
}

void Fleet::handed_back(WorkerId w, std::int64_t at_us) {
  workers_[w].handed_back_us = std::max(workers_[w].handed_back_us, at_us);
  refresh_load(w);
}

bool Fleet::is_registered(std::string_view name) const {
  return std::any_of(workers_.begin(), workers_.end(), [name](const Worker& worker) {
    return worker.name == name && worker.state != WorkerState::kGone;
  });
}

void Fleet::reserve(WorkerId w) {
  workers_[w].reserved = true;
  refresh_load(w);
}

void Fleet::release_reserved() {
  for (WorkerId w = 0; w < workers_.size(); ++w) {
    if (std::exchange(workers_[w].reserved, false)) refresh_load(w);
  }
}

void Fleet::failed(WorkerId w, std::int64_t now_us) {
  auto& worker = workers_[w];
  ++worker.failures;
  if (worker.backoff_us == 0) return;
  worker.backoff_us = std::min(2 * worker.backoff_us, kMostBackoffUs);
  worker.rests_until_us = now_us + worker.backoff_us;
  refresh_load(w);
}

void Fleet::succeeded(WorkerId w) {
  auto& worker = workers_[w];
  worker.failures = worker.strikes = 0;
  if (worker.backoff_us == 0) return;
  worker.backoff_us = 0;
  if (worker.state == WorkerState::kProbing) worker.state = WorkerState::kReady;
  refresh_load(w);
}

void Fleet::failed_alone(std::string_view name, std::int64_t now_us) {
  for (WorkerId w = 0; w < workers_.size(); ++w) {
    auto& worker = workers_[w];
    if (worker.name != name || ++worker.strikes < kStrikes || worker.backoff_us > 0) continue;
    worker.backoff_us = kFirstBackoffUs;
    worker.rests_until_us = now_us + kFirstBackoffUs;
    if (worker.state == WorkerState::kReady) worker.state = WorkerState::kProbing;
    refresh_load(w);
  }
}

HeldUnit* Fleet::find_held(WorkerId w, const queue::UnitRef& ref) {
  for (auto& unit : workers_[w].held) {
    if (unit.ref == ref) return &unit;
  }
  return nullptr;
}

void Fleet::started(WorkerId w, const queue::UnitRef& ref, std::int64_t at_us) {
  if (auto* unit = find_held(w, ref)) {
    unit->started = true;
    unit->started_us = at_us;
    refresh_load(w);
  }
}

int Fleet::most_open_slots(ModelId m) const {
  const auto& slots = peek(open_slots_, m);
  return slots.empty() ? -1 : slots.rbegin()->first;
}

int Fleet::most_adapter_slots(ModelId m) const {
  int most = -1;
  for (const auto w : with_model(m)) most = std::max(most, adapters_.slots(w));
  return most;
}

std::int64_t Fleet::most_open_pixels(ModelId m) const {
  const auto& pixels = peek(open_pixels_, m);
  return pixels.empty() ? ModelRoom::kUnlimited : pixels.rbegin()->first;
}

std::optional<WorkerId> Fleet::roomiest(ModelId m) const {
  std::optional<WorkerId> best;
  for (const auto w : with_model(m)) {
    if (room(m, w).max_pixels == ModelRoom::kUnlimited) return std::nullopt;
    if (!best || room(m, w).max_pixels > room(m, *best).max_pixels) best = w;
  }
  return best;
}

const queue::ModelMemory* Fleet::memory(ModelId m, WorkerId w) const {
  const auto& worker = workers_[w];
  const auto at = std::find(worker.models.begin(), worker.models.end(), m);
  const auto i = static_cast<std::size_t>(at - worker.models.begin());
  return i < worker.memory.size() ? &worker.memory[i] : nullptr;
}

}  // namespace ditfleet::scheduling
