#include "coordinator/scheduling/job_table.h"

#include <algorithm>

#include "coordinator/scheduling/placement/dense.h"
#include "coordinator/scheduling/placement/rendezvous_hash.h"

namespace ditfleet::scheduling {
namespace {

constexpr std::size_t kKeptClasses = 2048;

template <class Id>
std::optional<Id> find_id(const std::unordered_map<std::string, Id>& ids, const std::string& name) {
  const auto it = ids.find(name);
  return it == ids.end() ? std::nullopt : std::optional(it->second);
}

}  // namespace

ModelId JobTable::intern_model(const std::string& name) {
  const auto [it, fresh] = model_ids_.emplace(name, static_cast<ModelId>(models_.size()));
  if (fresh) {
    models_.push_back(name);
    queue_.set_most_slots(it->second, -1);  // until there is a worker
  }
  return it->second;
}

std::optional<ModelId> JobTable::find_model(const std::string& name) const { return find_id(model_ids_, name); }
std::optional<ClassId> JobTable::find_class(const std::string& key) const { return find_id(class_ids_, key); }

std::int64_t JobTable::tokens_of(const job::ShapeClass& shape) const {
  const auto entry = catalogue_.models.find(shape.model);
  return job::tokens_of(shape, entry == catalogue_.models.end() ? job::ModelEntry() : entry->second);
}

std::int64_t JobTable::needed_pixels(ClassId c) const {
  const auto pixels = classes_[c].pixels;
  return refuse_too_large_ && pixels > fleet_.most_pixels(classes_[c].model) ? 0 : pixels;
}

bool JobTable::fits(const Job& job, WorkerId w) const {
  return fleet_.room(job.model, w).max_pixels >= needed_pixels(job.cls) &&
         fleet_.adapters().slots(w) >= std::ssize(lanes_[job.lane].adapters);
}

ClassId JobTable::intern_class(const std::string& key, const std::string& model) {
  if (const auto known = find_class(key)) return *known;
  if (free_classes_.empty() && classes_.size() >= kKeptClasses) {
    for (ClassId c = 0; c < classes_.size(); ++c) {
      if (classes_[c].open > 0 || classes_[c].key.empty()) continue;
      class_ids_.erase(classes_[c].key);
      classes_[c] = {};
      costs_.forget_class(c);
      free_classes_.push_back(c);
    }
  }
  const auto id = take_id(classes_, free_classes_);
  const auto shape = job::parse_class_key(key);
  classes_[id] = {.key = key,
                  .hash = rendezvous_hash(shape_key(key)),
                  .model = intern_model(model),
                  .pixels = shape ? shape->pixels() : 0};
  class_ids_.emplace(key, id);
  fleet_.define_class(id, key);
  if (shape) costs_.define_class(id, tokens_of(*shape), shape->cache > 0);
  return id;
}

LaneId JobTable::enter_lane(ClassId cls, std::vector<AdapterId> adapters, std::vector<std::string> failed_on) {
  const auto [it, fresh] = lane_ids_.try_emplace({cls, adapters, failed_on}, 0);
  if (fresh) {
    it->second = take_id(lanes_, free_lanes_);
    auto hash = classes_[cls].hash;
    for (const auto a : adapters) {
      hash = mix_bits(hash ^ rendezvous_hash(fleet_.adapters().name(a)));
      fleet_.adapters().refer(a);
    }
    lanes_[it->second] = {.cls = cls, .adapters = std::move(adapters), .failed_on = std::move(failed_on), .hash = hash};
  }
  ++lanes_[it->second].open;
  return it->second;
}

void JobTable::leave_lane(LaneId id) {
  auto& lane = lanes_[id];
  if (--lane.open > 0) return;
  for (const auto a : lane.adapters) fleet_.adapters().unrefer(a);
  lane_ids_.erase({lane.cls, lane.adapters, lane.failed_on});
  lane = {};
  free_lanes_.push_back(id);
}

Job& JobTable::add(const std::string& id, const std::string& tenant, const std::string& model,
                   const std::string& class_key, const std::vector<std::string>& adapters, std::int64_t now_us) {
  auto& job = *(jobs_[id] = std::make_unique<Job>());
  job.id = id;
  job.tenant = queue_.tenants().intern(tenant);
  job.cls = intern_class(class_key, model);
  job.model = classes_[job.cls].model;
  std::set<AdapterId> needed;
  for (const auto& name : adapters) needed.insert(fleet_.adapters().intern(name));
  for (const auto a : needed) fleet_.adapters().asked_for(a, now_us);
  job.lane = enter_lane(job.cls, {needed.begin(), needed.end()}, {});
  job.arrival = ++arrivals_;
  return job;
}

void JobTable::grow(Job& job, int units, std::int64_t now_us) {
  for (int i = static_cast<int>(job.units.size()); i < units; ++i) {
    touch(job.units.emplace_back(Unit{.job = job, .index = i}), now_us);
    ++job.open;
    ++classes_[job.cls].open;
    queue_.tenants().open(job.tenant);
  }
}

Job* JobTable::find_job(const std::string& id) const {
  const auto it = jobs_.find(id);
  return it == jobs_.end() ? nullptr : it->second.get();
}

Unit* JobTable::find_unit(const queue::UnitRef& ref) const {
  auto* job = find_job(ref.job);
  return job != nullptr && ref.unit >= 0 && ref.unit < std::ssize(job->units) ? &job->units[ref.unit] : nullptr;
}

void JobTable::set_past(Unit& unit, int lapses, std::vector<std::string> failed_on, std::int64_t now_us) {
  if (unit.lapses == lapses && unit.failed_on == failed_on) return;
  if (unit.waits()) put_aside(unit, Where::kUnknown, now_us);  // ready() queues it again
  unit.lapses = lapses;
  unit.failed_on = failed_on;
  if (const auto before = std::exchange(unit.own_lane, std::nullopt)) leave_lane(*before);
  std::sort(failed_on.begin(), failed_on.end());
  if (!failed_on.empty())
    unit.own_lane = enter_lane(unit.job.cls, lanes_[unit.job.lane].adapters, std::move(failed_on));
}

void JobTable::ready(Unit& unit, std::int64_t ready_us, std::int64_t now_us) {
  const Job& job = unit.job;
  touch(unit, now_us);
  const bool parks = needed_pixels(job.cls) > fleet_.most_pixels(job.model);
  const auto where = parks ? Where::kParked : unit.lapses > 0 ? Where::kAlone : Where::kQueued;
  if (unit.where == where) return;
  put_aside(unit, where, now_us);
  unit.ready_us = ready_us > 0 ? std::min(ready_us, now_us) : now_us;
  if (where == Where::kAlone) alone_.insert(&unit);
  if (where != Where::kQueued) return;
  const auto cost_us = costs_.typical_run_us(job.cls, job.model, job.prior_us);
  unit.handle = queue_.push({.tenant = job.tenant,
                             .model = job.model,
                             .lane = unit.lane(),
                             .priority = job.priority,
                             .deadline_us = job.deadline_us,
                             .ready_us = unit.ready_us,
                             .due_us = unit.ready_us + routing_.due_after_us(cost_us),
                             .arrival = job.arrival * kMaxUnits + static_cast<std::uint64_t>(unit.index),
                             .adapter_slots = static_cast<int>(lanes_[job.lane].adapters.size()),
                             .prior_us = job.prior_us,
                             .cost_us = cost_us});
  grown(queued_, unit.handle) = &unit;
}

Residency::Dropped JobTable::hold(Unit& unit, const Route& route, std::string nonce, std::int64_t now_us) {
  const Job& job = unit.job;
  put_aside(unit, Where::kHeld, now_us);
  unit.worker = route.worker;
  unit.nonce = std::move(nonce);
  touch(unit, now_us);
  charge(unit, prediction(job, route.cold));
  const auto& adapters = lanes_[job.lane].adapters;
  auto dropped = fleet_.adapters().hold(route.worker, adapters, routing_.eviction(), now_us);
  fleet_.hold(route.worker, {.ref = unit.ref(),
                             .cls = job.cls,
                             .run_us = route.run_us + route.cold_us + route.load_us,
                             .assigned_us = now_us,
                             .cold = route.cold,
                             .exclusive = unit.lapses > 0,
                             .adapters = adapters,
                             .ready_us = route.need.ready_us,
                             .model = job.model,
                             .load_us = route.load_us});
  return dropped;
}

void JobTable::found_held(Unit& unit, const std::string& owner, const std::string& nonce, std::int64_t now_us) {
  const Job& job = unit.job;
  touch(unit, now_us);
  if (unit.where == Where::kHeld && unit.nonce == nonce) return;
  put_aside(unit, Where::kUnknown, now_us);
  Route route;
  route.worker = fleet_.intern_owner(owner);
  route.cold = !fleet_.is_warm(job.cls, route.worker);
  route.run_us = costs_.run_us(job.cls, job.model, route.worker, job.prior_us);
  if (route.cold) route.cold_us = costs_.cold_us(job.model, route.run_us);
  route.load_us = fleet_.room(job.model, route.worker).load_us;
  route.need = fleet_.adapters().scan(lanes_[job.lane].adapters, now_us).at(route.worker);
  hold(unit, route, nonce, now_us);
}

void JobTable::put_aside(Unit& unit, Where where, std::int64_t now_us) {
  if (unit.where == Where::kQueued) {
    queue_.remove(unit.handle);
  } else if (unit.where == Where::kAlone) {
    alone_.erase(&unit);
  } else if (unit.where == Where::kHeld) {
    const auto* held = fleet_.find_held(unit.worker, unit.ref());
    settle(unit, held != nullptr && held->started ? unit.charged_us : 0);
    fleet_.release(unit.worker, unit.ref(), now_us);
  }
  unit.nonce.clear();
  unit.where = where;
}

void JobTable::end(Unit& unit, std::int64_t now_us) {
  Job& job = unit.job;
  put_aside(unit, Where::kEnded, now_us);
  touch(unit, now_us);
  --classes_[job.cls].open;
  queue_.tenants().close(job.tenant);
  if (--job.open > 0) return;
  for (const auto& ended : job.units) {
    if (ended.own_lane) leave_lane(*ended.own_lane);
  }
  leave_lane(job.lane);
  if (ended_) ended_->insert(job.id);
  jobs_.erase(std::string(job.id));  // a copy: job.id dies during erase
}

void JobTable::reopen(Unit& unit) {
  ++unit.job.open;
  ++classes_[unit.job.cls].open;
  queue_.tenants().open(unit.job.tenant);
  unit.where = Where::kUnknown;
}

void JobTable::end_units(Job& job, std::optional<Where> where, std::int64_t now_us) {
  auto left = job.open;  // the end of the last open unit erases the job
  for (int i = 0; left > 0; ++i) {
    auto& unit = job.units[i];
    if (unit.where == Where::kEnded) continue;
    --left;
    if (!where || unit.where == *where) end(unit, now_us);
  }
}

void JobTable::repark(std::int64_t now_us) {
  std::set<ModelId> changed;
  for (ModelId m = 0; m < models_.size(); ++m) {
    const auto most = fleet_.most_pixels(m);
    if (std::exchange(grown(most_pixels_, m), most) != most) changed.insert(m);
  }
  if (changed.empty()) return;
  for (auto& [id, job] : jobs_) {
    if (!changed.contains(job->model)) continue;
    for (auto& unit : job->units) {
      if (unit.where == Where::kQueued || unit.where == Where::kParked) ready(unit, unit.ready_us, now_us);
    }
  }
}

std::pair<std::int64_t, bool> JobTable::prediction(const Job& job, bool cold) const {
  const auto run_us = costs_.typical_run_us(job.cls, job.model, job.prior_us);
  const auto cold_us = costs_.observed_cold_us(job.model);
  return {run_us + (cold ? cold_us.value_or(0) : 0), !costs_.confirmed(job.model) || (cold && !cold_us)};
}

void JobTable::charge(Unit& unit, const std::pair<std::int64_t, bool>& prediction) {
  std::tie(unit.charged_us, unit.guess) = prediction;
  queue_.tenants().charge(unit.job.tenant, unit.charged_us, unit.guess);
}

void JobTable::settle(Unit& unit, std::int64_t actual_us) {
  if (unit.charged_us == 0) return;
  queue_.tenants().settle(unit.job.tenant, std::exchange(unit.charged_us, 0), actual_us, unit.guess);
}

void JobTable::recharge(ModelId model) {
  for (const auto w : fleet_.with_model(model)) {
    for (const auto& held : fleet_.at(w).held) {
      auto* unit = find_unit(held.ref);
      if (unit == nullptr || unit->charged_us == 0 || unit->job.model != model) continue;
      const auto latest = prediction(unit->job, held.cold);
      if (latest == std::pair(unit->charged_us, unit->guess)) continue;
      settle(*unit, 0);
      charge(*unit, latest);
    }
  }
}

}  // namespace ditfleet::scheduling
