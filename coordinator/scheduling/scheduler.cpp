#include "coordinator/scheduling/scheduler.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "coordinator/scheduling/placement/dense.h"
#include "coordinator/scheduling/placement/earliest_finish_policy.h"
#include "coordinator/scheduling/placement/rendezvous_hash.h"

namespace ditfleet::scheduling {
namespace {

constexpr std::size_t kKeptClasses = 2048;
constexpr int kMaxUnits = 1024;  // of a stored job; the limit on requests is far lower

}  // namespace

Scheduler::Scheduler(SchedulerOptions options)
    : options_(std::move(options)),
      queue_(options_.weights, options_.age_bound_ms * 1000),
      fleet_(options_.lookahead, options_.silent_after_ms * 1000) {
  if (options_.routing == nullptr)
    options_.routing = std::make_shared<EarliestFinishPolicy>(EarliestFinishPolicy::Options{});
}

Scheduler::~Scheduler() = default;

ModelId Scheduler::intern_model(const std::string& name) {
  const auto [it, fresh] = model_ids_.emplace(name, static_cast<ModelId>(models_.size()));
  if (fresh) {
    models_.push_back(name);
    queue_.set_most_slots(it->second, -1);  // until there is a worker
  }
  return it->second;
}

std::vector<WorkerId> Scheduler::update_fleet(const std::vector<queue::WorkerInfo>& workers, std::int64_t now_us) {
  auto freed = fleet_.update(workers, now_us, [this](const std::string& name) { return intern_model(name); });
  slots_seen_.resize(models_.size(), 0);
  for (ModelId m = 0; m < models_.size(); ++m) {
    const int slots = fleet_.most_adapter_slots(m);
    queue_.set_most_slots(m, slots);
    slots_seen_[m] = std::max(slots_seen_[m], slots);
  }
  return freed;
}

int Scheduler::most_slots_seen(const std::string& model) const {
  const auto it = model_ids_.find(model);
  if (it == model_ids_.end() || it->second >= slots_seen_.size()) return 0;
  const auto& workers = fleet_.with_model(it->second);
  const bool unreported = std::any_of(workers.begin(), workers.end(), [this](WorkerId w) {
    return fleet_.at(w).state == WorkerState::kStarting && fleet_.adapters().slots(w) == 0;
  });
  return unreported ? 0 : slots_seen_[it->second];
}

std::optional<Error> Scheduler::unmet_memory(const Classified& job) const {
  const auto model = model_ids_.find(job.spec.model);
  if (!options_.refuse_too_large || model == model_ids_.end()) return std::nullopt;
  const auto w = fleet_.roomiest(model->second);
  if (!w) return std::nullopt;
  return scheduling::unmet_memory(job, fleet_.at(*w).name, *fleet_.memory(model->second, *w));
}

std::int64_t Scheduler::needed_pixels(ClassId c) const {
  const auto pixels = classes_[c].pixels;
  return options_.refuse_too_large && pixels > fleet_.most_pixels(classes_[c].model) ? 0 : pixels;
}

void Scheduler::repark(std::int64_t now_us) {
  std::vector<bool> changed(models_.size());
  bool any = false;
  for (ModelId m = 0; m < models_.size(); ++m) {
    const auto most = fleet_.most_pixels(m);
    changed[m] = std::exchange(grown(most_pixels_, m), most) != most;
    any |= changed[m];
  }
  if (!any) return;
  for (auto& [id, job] : jobs_) {
    if (!changed[job->model]) continue;
    for (int i = 0; i < static_cast<int>(job->units.size()); ++i) {
      const auto& unit = job->units[static_cast<std::size_t>(i)];
      if (unit.where == Unit::Where::kQueued || unit.where == Unit::Where::kParked)
        unit_ready(*job, i, unit.ready_us, now_us);
    }
  }
}

// A model that is no longer configured counts as one of images.
std::int64_t Scheduler::tokens_of(const job::ShapeClass& shape) const {
  const auto entry = options_.catalogue.models.find(shape.model);
  return job::tokens_of(shape, entry == options_.catalogue.models.end() ? job::ModelEntry() : entry->second);
}

ClassId Scheduler::intern_class(const std::string& key, const std::string& model) {
  if (const auto it = class_ids_.find(key); it != class_ids_.end()) return it->second;
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
  if (shape) costs_.define_class(id, tokens_of(*shape));
  return id;
}

LaneId Scheduler::enter_lane(ClassId cls, std::vector<AdapterId> adapters, std::vector<std::string> failed_on) {
  const auto [it, fresh] = lane_ids_.try_emplace({cls, adapters, failed_on}, 0);
  if (!fresh) {
    ++lanes_[it->second].open;
    return it->second;
  }
  it->second = take_id(lanes_, free_lanes_);
  auto hash = classes_[cls].hash;
  for (const auto a : adapters) {
    hash = mix_bits(hash ^ rendezvous_hash(fleet_.adapters().name(a)));
    fleet_.adapters().refer(a);
  }
  lanes_[it->second] = {
      .cls = cls, .adapters = std::move(adapters), .failed_on = std::move(failed_on), .hash = hash, .open = 1};
  return it->second;
}

void Scheduler::leave_lane(LaneId id) {
  auto& lane = lanes_[id];
  if (--lane.open > 0) return;
  for (const auto a : lane.adapters) fleet_.adapters().unrefer(a);
  lane_ids_.erase({lane.cls, lane.adapters, lane.failed_on});
  lane = {};
  free_lanes_.push_back(id);
}

void Scheduler::forget_job(const Job& job) {
  for (const auto& unit : job.units) {
    if (unit.lane) leave_lane(*unit.lane);
  }
  leave_lane(job.lane);
  if (ended_since_) ended_since_->insert(job.id);
  jobs_.erase(std::string(job.id));  // a copy: job.id dies during erase
}

Scheduler::Job* Scheduler::find_job(const std::string& id) const {
  const auto it = jobs_.find(id);
  return it == jobs_.end() ? nullptr : it->second.get();
}

Scheduler::Unit* Scheduler::find_unit(const queue::UnitRef& ref, Job** job) {
  *job = find_job(ref.job);
  if (*job == nullptr || ref.unit < 0 || ref.unit >= static_cast<int>((*job)->units.size())) return nullptr;
  return &(*job)->units[ref.unit];
}

Scheduler::Job& Scheduler::add_job(const std::string& id, const std::string& tenant, const std::string& model,
                                   const std::string& class_key, const std::vector<std::string>& adapters, int units,
                                   std::int64_t now_us) {
  auto& slot = jobs_[id];
  slot = std::make_unique<Job>();
  auto& job = *slot;
  job.id = id;
  job.tenant = queue_.tenants().intern(tenant);
  job.cls = intern_class(class_key, model);
  job.model = classes_[job.cls].model;
  std::set<AdapterId> needed;
  for (const auto& name : adapters) needed.insert(fleet_.adapters().intern(name));
  for (const auto a : needed) fleet_.adapters().asked_for(a, now_us);
  job.lane = enter_lane(job.cls, {needed.begin(), needed.end()}, {});
  job.arrival = ++arrivals_;
  job.units.resize(units);
  job.open = job.units.size();
  classes_[job.cls].open += job.open;
  for (auto& unit : job.units) {
    unit.touched_us = now_us;
    queue_.tenants().open(job.tenant);
  }
  return job;
}

// Removes the unit from where it is. The caller sets the new `where`.
void Scheduler::leave(Job& job, Unit& unit, int index, std::int64_t now_us) {
  settle(job, unit, index, -1);
  if (unit.where == Unit::Where::kQueued) {
    queue_.remove(unit.handle);
  } else if (unit.where == Unit::Where::kAlone) {
    alone_.erase({&job, index});
  } else if (unit.where == Unit::Where::kParked) {
    parked_.erase({&job, index});
  } else if (unit.where == Unit::Where::kHeld) {
    fleet_.release(unit.worker, {job.id, index}, now_us);
  }
  unit.nonce.clear();
}

void Scheduler::set_past(Job& job, int index, int lapses, std::vector<std::string> failed_on, std::int64_t now_us) {
  auto& unit = job.units[index];
  if (unit.where == Unit::Where::kEnded || (unit.lapses == lapses && unit.failed_on == failed_on)) return;
  if (is_waiting(unit)) {  // unit_ready() queues it again
    leave(job, unit, index, now_us);
    unit.where = Unit::Where::kUnknown;
  }
  unit.lapses = lapses;
  unit.failed_on = failed_on;
  if (const auto before = std::exchange(unit.lane, std::nullopt)) leave_lane(*before);
  std::sort(failed_on.begin(), failed_on.end());
  if (!failed_on.empty()) unit.lane = enter_lane(job.cls, lanes_[job.lane].adapters, std::move(failed_on));
}

void Scheduler::unit_ready(Job& job, int index, std::int64_t ready_us, std::int64_t now_us) {
  auto& unit = job.units[index];
  unit.touched_us = now_us;
  const auto where = must_park(job)    ? Unit::Where::kParked
                     : unit.lapses > 0 ? Unit::Where::kAlone
                                       : Unit::Where::kQueued;
  if (unit.where == where || unit.where == Unit::Where::kEnded) return;
  leave(job, unit, index, now_us);
  unit.where = where;
  unit.ready_us = ready_us > 0 ? std::min(ready_us, now_us) : now_us;
  if (where == Unit::Where::kAlone) {
    alone_.emplace(&job, index);
    return;
  }
  if (where == Unit::Where::kParked) {
    parked_.emplace(&job, index);
    return;
  }
  const auto cost_us = costs_.typical_run_us(job.cls, job.model, job.prior_us);
  unit.handle = queue_.push({.tenant = job.tenant,
                             .model = job.model,
                             .lane = lane_of(job, unit),
                             .priority = job.priority,
                             .deadline_us = job.deadline_us,
                             .ready_us = unit.ready_us,
                             .due_us = unit.ready_us + options_.routing->due_after_us(cost_us),
                             .arrival = job.arrival * kMaxUnits + static_cast<std::uint64_t>(index),
                             .adapter_slots = static_cast<int>(lanes_[job.lane].adapters.size()),
                             .prior_us = job.prior_us,
                             .cost_us = cost_us});
  grown(queued_, unit.handle) = {&job, index};
}

Residency::Dropped Scheduler::hold(Job& job, int index, const Route& route, std::string nonce, std::int64_t now_us) {
  auto& unit = job.units[index];
  unit.where = Unit::Where::kHeld;
  unit.worker = route.worker;
  unit.nonce = std::move(nonce);
  unit.touched_us = now_us;
  charge(job, unit, route.cold);
  const auto& adapters = lanes_[job.lane].adapters;
  auto dropped = fleet_.adapters().hold(route.worker, adapters, options_.routing->eviction(), now_us);
  fleet_.hold(route.worker, {.ref = {job.id, index},
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

// An earlier leader, or this scheduler before a restart, has assigned the unit.
void Scheduler::unit_held(Job& job, int index, const std::string& owner, const std::string& nonce,
                          std::int64_t now_us) {
  auto& unit = job.units[index];
  unit.touched_us = now_us;
  if (unit.where == Unit::Where::kHeld && unit.nonce == nonce) return;
  leave(job, unit, index, now_us);
  Route route;
  route.worker = fleet_.intern_owner(owner);
  route.cold = !fleet_.is_warm(job.cls, route.worker);
  route.run_us = costs_.run_us(job.cls, job.model, route.worker, job.prior_us);
  if (route.cold) route.cold_us = costs_.cold_us(job.model, route.run_us);
  if (const auto rooms = fleet_.rooms(job.model); route.worker < rooms.size())
    route.load_us = rooms[route.worker].load_us;
  route.need = fleet_.adapters().scan(lanes_[job.lane].adapters, now_us).at(route.worker);
  hold(job, index, route, nonce, now_us);
}

void Scheduler::unit_delayed(Job& job, int index, std::int64_t now_us) {
  auto& unit = job.units[index];
  unit.touched_us = now_us;
  if (unit.where == Unit::Where::kEnded) return;
  leave(job, unit, index, now_us);
  unit.where = Unit::Where::kDelayed;
}

void Scheduler::unit_ended(Job& job, int index, std::int64_t now_us) {
  auto& unit = job.units[index];
  if (unit.where == Unit::Where::kEnded) return;
  leave(job, unit, index, now_us);
  unit.where = Unit::Where::kEnded;
  --classes_[job.cls].open;
  queue_.tenants().close(job.tenant);
  if (--job.open == 0) forget_job(job);
}

void Scheduler::end_units(Job& job, std::optional<Unit::Where> where, std::int64_t now_us) {
  auto left = job.open;  // the end of the last open unit erases the job
  for (int i = 0; left > 0 && i < static_cast<int>(job.units.size()); ++i) {
    if (job.units[i].where == Unit::Where::kEnded) continue;
    --left;
    if (!where || job.units[i].where == *where) unit_ended(job, i, now_us);
  }
}

// --- inputs ----------------------------------------------------------------------------------------

void Scheduler::rebuild(std::span<const queue::UnitView> open, const std::map<std::string, std::int64_t>& virtual_times,
                        const std::vector<queue::WorkerInfo>& workers, std::int64_t grace_ms, std::int64_t now_us) {
  grace_until_us_ = now_us + grace_ms * 1000;
  update_fleet(workers, now_us);
  // In the order of arrival, so that ties break as before the restart.
  std::vector<const queue::UnitView*> views;
  for (const auto& view : open) views.push_back(&view);
  std::stable_sort(views.begin(), views.end(), [](const auto* a, const auto* b) {
    return std::tie(a->created_ms, a->ref) < std::tie(b->created_ms, b->ref);
  });
  for (const auto* view : views) {
    Job& job = job_of(*view, now_us);
    if (view->ref.unit < 0 || view->ref.unit >= static_cast<int>(job.units.size())) continue;
    apply_view(*view, now_us);
  }
  for (auto it = jobs_.begin(); it != jobs_.end();) {  // units that are not stored have ended
    auto& job = *(it++)->second;                       // the next call may erase it
    end_units(job, Unit::Where::kPending, now_us);
  }
  // Last: the stored times include the charges for held units, which were just made again.
  queue_.restore(virtual_times);
}

Scheduler::Job& Scheduler::job_of(const queue::UnitView& view, std::int64_t now_us) {
  const int units = std::clamp(view.ref.unit, 0, kMaxUnits - 1) + 1;
  if (auto* known = find_job(view.ref.job)) {
    while (static_cast<int>(known->units.size()) < units) {  // views come one unit at a time
      known->units.emplace_back().touched_us = now_us;
      ++known->open;
      ++classes_[known->cls].open;
      queue_.tenants().open(known->tenant);
    }
    return *known;
  }
  auto& job = add_job(view.ref.job, view.tenant, view.model, view.class_key, view.adapters, units, now_us);
  job.priority = view.priority;
  job.cost_us = view.cost_us;
  job.deadline_us = view.deadline_ms * 1000;
  const auto shape = job::parse_class_key(view.class_key);
  job.prior_us = shape && view.steps > 0 ? prior_run_us(*shape, tokens_of(*shape), view.steps, !view.adapters.empty())
                                         : std::max<std::int64_t>(1, view.cost_us);
  costs_.seed(job.cls, job.model, job.prior_us, job.cost_us);
  return job;
}

void Scheduler::apply_view(const queue::UnitView& view, std::int64_t now_us) {
  Job& job = job_of(view, now_us);
  const int index = view.ref.unit;
  if (index < 0 || index >= static_cast<int>(job.units.size())) return;
  set_past(job, index, view.lapses, view.failed_on, now_us);
  switch (view.state) {
    case job::State::kReady:
      if (view.not_before_ms * 1000 > now_us) {
        unit_delayed(job, index, now_us);
      } else {
        unit_ready(job, index, view.ready_ms * 1000, now_us);
      }
      break;
    case job::State::kAssigned:
    case job::State::kRunning:
      unit_held(job, index, view.owner, view.nonce, now_us);
      if (view.state == job::State::kRunning) {
        const auto* held = fleet_.find_held(job.units[index].worker, view.ref);
        if (held != nullptr && !held->started) fleet_.started(job.units[index].worker, view.ref, now_us);
      }
      break;
    default: break;
  }
}

void Scheduler::begin_audit() { ended_since_.emplace(); }

void Scheduler::audit(std::span<const queue::UnitView> open, std::int64_t asked_us, std::int64_t now_us) {
  wants_audit_ = false;
  std::unordered_map<std::string, std::vector<const queue::UnitView*>> stored;
  for (const auto& view : open) stored[view.ref.job].push_back(&view);
  std::vector<queue::UnitRef> vanished;
  for (auto& [id, job] : jobs_) {
    const auto it = stored.find(id);
    for (int i = 0; i < static_cast<int>(job->units.size()); ++i) {
      const auto& unit = job->units[i];
      if (unit.where == Unit::Where::kEnded || unit.touched_us >= asked_us) continue;
      const bool is_stored = it != stored.end() && std::any_of(it->second.begin(), it->second.end(),
                                                               [i](const auto* v) { return v->ref.unit == i; });
      if (!is_stored) vanished.push_back({id, i});
    }
  }
  for (const auto& ref : vanished) {
    if (auto* job = find_job(ref.job)) unit_ended(*job, ref.unit, now_us);
  }
  const auto ended = std::exchange(ended_since_, std::nullopt);
  for (const auto& view : open) {
    Job* job = nullptr;
    const auto* unit = find_unit(view.ref, &job);
    if (job == nullptr && ended && ended->contains(view.ref.job)) continue;
    if (unit != nullptr && (unit->touched_us >= asked_us || unit->where == Unit::Where::kEnded)) continue;
    const bool queued =
        unit != nullptr && is_waiting(*unit) && unit->lapses == view.lapses && unit->failed_on == view.failed_on;
    const bool held = unit != nullptr && unit->where == Unit::Where::kHeld && unit->nonce == view.nonce;
    if (queued && view.state == job::State::kReady) continue;
    if (held && view.state == job::State::kAssigned) continue;
    apply_view(view, now_us);
  }
}

Estimate Scheduler::estimate(const job::JobSpec& spec, const std::string& tenant, std::int64_t now_us) const {
  Estimate out;
  const auto entry = options_.catalogue.models.find(spec.model);
  if (entry == options_.catalogue.models.end()) return out;
  const auto job = classify(spec, entry->second, options_.precision);
  const auto model = model_ids_.find(spec.model);
  if (model == model_ids_.end()) {
    out.run_us = job.prior_us;
    return out;
  }
  const auto cls = class_ids_.find(job.class_key);
  const auto c = cls == class_ids_.end() ? static_cast<ClassId>(-1) : cls->second;
  const auto m = model->second;
  out.run_us = cls == class_ids_.end() ? costs_.unseen_run_us(m, job.tokens, job.prior_us)
                                       : costs_.typical_run_us(c, m, job.prior_us);
  out.observed = costs_.observed(m);
  // A lower bound: counts the tenant's own queue only, not the shares of other tenants.
  std::int64_t soonest = -1, workers = 0;
  for (const auto w : fleet_.with_model(m)) {
    const auto& worker = fleet_.at(w);
    if (worker.state != WorkerState::kReady) continue;
    ++workers;
    const auto wait = std::max<std::int64_t>(0, fleet_.load(w).start_us(now_us) - now_us);
    soonest = soonest < 0 ? wait : std::min(soonest, wait);
  }
  if (workers == 0) return out;
  const auto t = queue_.tenants().find(tenant);
  const auto work = t ? queue_.tenant_work_us(m, *t) : 0;
  out.wait_us = soonest + (work > 0 ? costs_.typical_run_us(c, m, work) / workers : 0);
  return out;
}

std::optional<std::pair<std::string, std::string>> Scheduler::class_of(const std::string& id) const {
  const Job* job = find_job(id);
  if (!job) return std::nullopt;
  return std::pair(classes_[job->cls].key, models_[job->model]);
}

std::string Scheduler::first_adapter_of(const std::string& id) const {
  const Job* job = find_job(id);
  if (!job || lanes_[job->lane].adapters.empty()) return {};
  return fleet_.adapters().name(lanes_[job->lane].adapters.front());
}

QueueStats Scheduler::stats() const {
  QueueStats out;
  out.jobs = jobs_.size();
  out.unplaceable = queue_.unplaceable() + parked_.size();
  for (const auto& [id, job] : jobs_) {
    for (const auto& unit : job->units) {
      if (is_waiting(unit))
        out.oldest_ready_us = out.ready++ == 0 ? unit.ready_us : std::min(out.oldest_ready_us, unit.ready_us);
      out.held += unit.where == Unit::Where::kHeld;
      out.delayed += unit.where == Unit::Where::kDelayed;
    }
  }
  for (WorkerId w = 0; w < fleet_.id_bound(); ++w) {
    const auto& worker = fleet_.at(w);
    if (worker.owner.empty()) continue;
    ++out.workers[worker.state];
    using enum WorkerState;
    if (worker.state == kSilent || worker.state == kStuck || worker.state == kOverdue || worker.state == kProbing)
      out.unwell[worker.name] = worker.state;
  }
  return out;
}

}  // namespace ditfleet::scheduling
