#include "coordinator/simulation/simulation.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <queue>
#include <set>
#include <unordered_map>

#include "coordinator/scheduling/placement/earliest_finish_policy.h"
#include "coordinator/scheduling/scheduler.h"
#include "coordinator/simulation/random.h"
#include "coordinator/simulation/range.h"
#include "coordinator/simulation/service_gap.h"
#include "coordinator/simulation/worker_model.h"
#include "shared/core/json.h"

namespace ditfleet::simulation {
namespace {

using scheduling::Scheduler;

constexpr std::int64_t kStartUs = 1'000'000'000'000;  // of the virtual clock: any time
constexpr std::int64_t kHeartbeatUs = 1'000'000;      // as often as the service polls the registry
constexpr std::int64_t kTickUs = 100'000;             // as often as the service decides without an event

double percentile(const std::vector<double>& sorted, double part) {
  if (sorted.empty()) return 0;
  const auto at = static_cast<std::size_t>(part * static_cast<double>(sorted.size()));
  return sorted[std::min(at, sorted.size() - 1)];
}

class Simulation {
 public:
  Simulation(const Trace& trace, const CostTable& costs, const SimulationOptions& options, int workers,
             std::shared_ptr<scheduling::RoutingPolicy> policy)
      : trace_(trace),
        costs_(costs),
        random_(options.seed),
        counted_from_(static_cast<std::size_t>(options.warm_up * static_cast<double>(trace.jobs.size()))) {
    for (int w = 0; w < workers; ++w) {
      const auto name = fmt::format("w{:04}", w);
      by_owner_.emplace(name + ":sim", workers_.size());
      workers_.emplace_back(name, costs);
    }
    scheduling::SchedulerOptions scheduler;
    job::ModelEntry model;
    model.name = "model";
    for (const job::Field field : {job::Field("width"), job::Field("height"), job::Field("num_inference_steps")})
      model.apply(field);
    model.guidance = [](const job::FieldValues&) { return job::GuidanceKind::kEmbedded; };
    std::set<std::string> adapters;
    for (const auto& job : trace.jobs) {
      if (!job.adapter.empty()) adapters.insert(job.adapter);
    }
    scheduler.catalogue.models["model"] = model;
    scheduler.catalogue.default_model = "model";
    scheduler.lookahead = costs.lookahead;
    // The names in the trace serve as digests.
    scheduler.adapters = [](const std::string&, const job::LoraUse& use, const job::ModelEntry&) {
      return Result<std::string>(use.name);
    };
    scheduler.new_nonce = [this] { return std::to_string(++nonces_); };
    scheduler.routing = std::move(policy);
    scheduler_ = std::make_unique<Scheduler>(std::move(scheduler));
    for (const auto& adapter : adapters)
      scheduler_->adapters().set_size(scheduler_->adapters().intern(adapter), costs.adapter_bytes);
    for (const auto& job : trace.jobs) {
      const double spread = 1.0 + costs.run_spread * (2.0 * random_.unit() - 1.0);
      const double run_us =
          job.run_us > 0
              ? static_cast<double>(job.run_us)
              : static_cast<double>(costs.run_us(job.width, job.height, job.steps, !job.adapter.empty())) * spread;
      run_us_.push_back(std::max<std::int64_t>(1, std::llround(run_us / options.speed)));
      cold_us_.push_back(job.run_us > 0 ? 0 : std::llround(static_cast<double>(costs.cold_class_us) / options.speed));
    }
    took_us_ = run_us_;
    ended_us_.resize(trace.jobs.size());
  }

  // An error if the scheduler rejects a job: figures must count every job.
  Result<void> run() {
    heartbeat(kStartUs);
    at(next_heartbeat_us(kStartUs), What::kHeartbeat, 0);
    for (std::size_t i = 0; i < trace_.jobs.size(); ++i) at(kStartUs + trace_.jobs[i].at_us, What::kArrival, i);
    while (ended_ < trace_.jobs.size()) {
      const auto now = events_.top().at_us;
      while (!events_.empty() && events_.top().at_us == now) {
        const auto event = events_.top();
        events_.pop();
        process(event, now);
      }
      if (auto decided = decide(now); !decided) return decided;
      gap_.look();
    }
    return {};
  }

  std::vector<Figure> figures();  // call it once, after run()

 private:
  enum class What { kEnd, kLoaded, kHeartbeat, kArrival, kTick };  // in this order at equal times
  struct Event {
    std::int64_t at_us = 0;
    What what = What::kTick;
    std::size_t which = 0;
    std::uint64_t number = 0;
    bool operator>(const Event& other) const {
      return std::tie(at_us, what, number) > std::tie(other.at_us, other.what, other.number);
    }
  };
  void at(std::int64_t when, What what, std::size_t which) { events_.push({when, what, which, ++numbers_}); }

  void send(const queue::UnitRef& ref, const char* type, std::int64_t now,
            std::map<std::string, std::string> fields = {}) {
    scheduler_->on_event(
        {.job = ref.job, .type = type, .unit = ref.unit, .at_ms = now / 1000, .fields = std::move(fields)}, now);
  }
  static std::size_t index_of(const queue::UnitRef& ref) { return std::stoul(ref.job); }

  void heartbeat(std::int64_t now) {
    std::vector<queue::WorkerInfo> infos;
    for (const auto& worker : workers_) infos.push_back(worker.heartbeat(now));
    scheduler_->on_workers(infos, now);
  }

  void process(const Event& event, std::int64_t now) {
    switch (event.what) {
      case What::kArrival: arrive(event.which, now); break;
      case What::kEnd: {
        const auto unit = workers_[event.which].finish(now);
        const auto job = index_of(unit.ref);
        gap_.ended(trace_.jobs[job].tenant, took_us_[job]);
        ended_us_[job] = last_end_us_ = now - kStartUs;
        ++ended_;
        send(unit.ref, "succeeded", now);
        start(event.which, now);
        break;
      }
      case What::kLoaded: start(event.which, now); break;
      case What::kHeartbeat:
        heartbeat(now);
        at(next_heartbeat_us(now), What::kHeartbeat, 0);
        break;
      case What::kTick: ticking_ = false; break;
    }
  }

  // The time of the next heartbeat. Skips heartbeats while all workers are idle.
  std::int64_t next_heartbeat_us(std::int64_t now) const {
    if (arrived_ != ended_ || arrived_ == trace_.jobs.size()) return now + kHeartbeatUs;
    const auto beats = (kStartUs + trace_.jobs[arrived_].at_us - now) / kHeartbeatUs;
    return now + std::max<std::int64_t>(1, beats) * kHeartbeatUs;
  }

  // Schedules the next decision while units wait.
  void tick(std::int64_t now) {
    if (ticking_ || scheduler_->ready() == 0) return;
    ticking_ = true;
    at(now + kTickUs - (now - kStartUs) % kTickUs, What::kTick, 0);
  }

  void arrive(std::size_t index, std::int64_t now) {
    ++arrived_;
    const auto& job = trace_.jobs[index];
    json::object spec{{"model", "model"},   {"prompt", ""},         {"seed", 1},
                      {"width", job.width}, {"height", job.height}, {"num_inference_steps", job.steps}};
    if (!job.adapter.empty()) spec["loras"] = json::array{json::object{{"name", job.adapter}}};
    queue::IntakeEntry entry;
    entry.id = std::to_string(index);
    entry.entry_id = fmt::format("{}-0", now / 1000);
    entry.tenant = job.tenant;
    entry.spec = json::serialize(spec);
    entry.created_ms = now / 1000;
    if (index == counted_from_) {
      gap_at_first_us_ = gap_.widest_us();
      gap_.forget_widest();
    }
    gap_.queued(job.tenant);
    scheduler_->on_intake(std::span(&entry, 1), now);
  }

  // Performs actions as the service does, until there are none. No action is refused.
  Result<void> decide(std::int64_t now) {
    for (;;) {
      const auto queued = scheduler_->ready();
      const auto began = std::chrono::steady_clock::now();
      auto actions = scheduler_->decide(now);
      const double took_us =
          std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - began).count();
      if (actions.empty()) {
        tick(now);
        return {};
      }
      std::size_t units = 0;
      for (const auto& batch : actions.assign) units += batch.units.size();
      if (units > 0) {
        decisions_us_.push_back(took_us / static_cast<double>(units));
        if (queued >= 8'000 && queued <= 12'000) decisions_at_10000_us_.push_back(decisions_us_.back());
      }
      if (!actions.reject.empty()) return rejection(actions.reject.front());
      for (const auto& admitted : actions.admit) {
        classes_.insert_or_assign(admitted.id, admitted.class_key);
        send({admitted.id, 0}, "ready", now);
      }
      for (const auto* attempts : {&actions.revoke, &actions.lost}) {
        for (const auto& attempt : *attempts) revoke(attempt, now);
      }
      for (auto& batch : actions.assign) {
        const auto worker = by_owner_.at(batch.owner);
        for (auto& unit : batch.units) assign(worker, unit, now);
        start(worker, now);
      }
    }
  }

  Error rejection(const queue::Rejection& rejected) const {
    const auto index = std::stoul(rejected.id);
    const int line = trace_.jobs[index].line;
    return invalid_argument(fmt::format(
        "the scheduler rejects the job {}: {}",
        line > 0 ? fmt::format("in line {}", line) : fmt::format("number {}", index + 1), rejected.error.message));
  }

  void assign(std::size_t worker, queue::AssignRequest& unit, std::int64_t now) {
    const auto job = index_of(unit.ref);
    const auto& adapter = trace_.jobs[job].adapter;
    took_us_[job] = run_us_[job] + (workers_[worker].is_cold(classes_.at(unit.ref.job)) ? cold_us_[job] : 0);
    gap_.assigned(trace_.jobs[job].tenant, took_us_[job]);
    send(unit.ref, "assigned", now);
    const bool missed = workers_[worker].take({.ref = unit.ref,
                                               .nonce = unit.nonce,
                                               .class_key = classes_.at(unit.ref.job),
                                               .adapter = adapter,
                                               .run_us = run_us_[job],
                                               .cold_us = cold_us_[job],
                                               .drop_from_host = std::move(unit.drop_from_host),
                                               .drop_from_slots = std::move(unit.drop_from_slots)},
                                              now);
    host_misses_ += missed && job >= counted_from_;
  }

  void revoke(const queue::Attempt& attempt, std::int64_t now) {
    for (std::size_t w = 0; w < workers_.size(); ++w) {
      const auto unit = workers_[w].revoke(attempt);
      if (!unit) continue;
      const auto job = index_of(unit->ref);
      gap_.returned(trace_.jobs[job].tenant, took_us_[job]);
      send(attempt.ref, "ready", now, {{"reason", "revoked"}});
      start(w, now);  // the unit behind it
      return;
    }
  }

  void start(std::size_t worker, std::int64_t now) {
    const auto begun = workers_[worker].start(now);
    if (!begun) {
      if (const auto next = workers_[worker].next_us()) at(*next, What::kLoaded, worker);
      return;
    }
    const auto job = index_of(begun->unit->ref);
    if (job >= counted_from_) {
      ++counted_;
      with_adapter_ += !begun->unit->adapter.empty();
      slot_misses_ += begun->slot_miss;
      cold_classes_ += begun->cold_class;
    }
    const auto takes_us = begun->ends_us - begun->started_us;
    gap_.corrected(trace_.jobs[job].tenant, takes_us - took_us_[job]);
    took_us_[job] = takes_us;
    send(begun->unit->ref, "started", begun->started_us);
    at(begun->ends_us, What::kEnd, worker);
  }

  const Trace& trace_;
  const CostTable& costs_;
  Random random_;
  std::size_t counted_from_;
  std::vector<WorkerModel> workers_;
  std::unordered_map<std::string, std::size_t> by_owner_;
  std::unordered_map<std::string, std::string> classes_;
  std::unique_ptr<Scheduler> scheduler_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::uint64_t numbers_ = 0, nonces_ = 0;
  std::vector<std::int64_t> run_us_, took_us_;  // took_us_ includes the cost of a cold class
  std::vector<std::int64_t> cold_us_;           // that cost
  std::vector<std::int64_t> ended_us_;          // in the trace's time, as is last_end_us_
  std::vector<double> decisions_us_;            // per assigned unit
  std::vector<double> decisions_at_10000_us_;   // with about 10,000 queued units
  ServiceGap gap_;
  bool ticking_ = false;
  std::size_t arrived_ = 0, ended_ = 0, counted_ = 0, with_adapter_ = 0, host_misses_ = 0, slot_misses_ = 0,
              cold_classes_ = 0;
  std::int64_t last_end_us_ = 0, gap_at_first_us_ = 0;
};

std::vector<Figure> Simulation::figures() {
  std::vector<double> latencies;
  std::size_t objectives = 0, attained = 0;
  for (std::size_t i = counted_from_; i < trace_.jobs.size(); ++i) {
    const auto us = ended_us_[i] - trace_.jobs[i].at_us;
    latencies.push_back(static_cast<double>(us) / 1e6);
    if (trace_.jobs[i].slo_us == 0) continue;
    ++objectives;
    attained += us <= trace_.jobs[i].slo_us;
  }
  std::sort(latencies.begin(), latencies.end());
  double deciding = 0, busy = 0;
  for (const double us : decisions_us_) deciding += us;
  for (const auto& worker : workers_) busy += static_cast<double>(worker.busy_us());
  const double span_us = static_cast<double>(last_end_us_ - trace_.jobs.front().at_us);
  const auto part = [](std::size_t of, std::size_t all) {
    return all == 0 ? 0.0 : static_cast<double>(of) / static_cast<double>(all);
  };
  const auto longest = *std::max_element(took_us_.begin(), took_us_.end());
  std::vector<Figure> out = {
      {"latency_p50", percentile(latencies, .50), "s"},
      {"latency_p95", percentile(latencies, .95), "s"},
      {"latency_p99", percentile(latencies, .99), "s"},
      {"throughput", static_cast<double>(trace_.jobs.size()) / span_us * 1e6, "jobs/s"},
      {"utilisation", busy / span_us / static_cast<double>(workers_.size()), "1"},
      {"host_misses", static_cast<double>(host_misses_), "loads"},
      {"host_miss_ratio", part(host_misses_, with_adapter_), "1"},
      {"slot_misses", static_cast<double>(slot_misses_), "swaps"},
      {"slot_miss_ratio", part(slot_misses_, with_adapter_), "1"},
      {"cold_classes", static_cast<double>(cold_classes_), "runs"},
      {"fairness_gap", static_cast<double>(gap_.widest_us()) / static_cast<double>(longest), "largest jobs"},
      {"fairness_gap_at_first", static_cast<double>(gap_at_first_us_) / static_cast<double>(longest), "largest jobs"},
      {"decision_mean", deciding / static_cast<double>(decisions_us_.size()), "us"}};
  if (objectives > 0) out.push_back({"slo_attained", part(attained, objectives), "1"});
  if (decisions_at_10000_us_.size() >= 100) {
    std::sort(decisions_at_10000_us_.begin(), decisions_at_10000_us_.end());
    out.push_back({"decision_p50_at_10000_queued", percentile(decisions_at_10000_us_, .50), "us"});
  }
  return out;
}

}  // namespace

double Report::figure(const std::string& metric) const {
  const auto it = std::find_if(figures.begin(), figures.end(), [&](const Figure& f) { return f.metric == metric; });
  return it == figures.end() ? std::nan("") : it->value;
}

Result<Report> simulate(const Trace& trace, const CostTable& costs, const SimulationOptions& options) {
  if (trace.jobs.empty()) return invalid_argument("the trace has no jobs");
  const int workers = options.workers != 0 ? options.workers : trace.workers;
  if (workers == 0) return invalid_argument("the trace does not contain the number of workers; give --workers");
  if (!kWorkers.has(workers)) return kWorkers.error("the number of workers", std::to_string(workers));
  if (!(options.warm_up >= 0 && options.warm_up < 1))
    return invalid_argument("--warm-up must be at least 0 and below 1");
  using scheduling::EarliestFinishPolicy;
  auto policy =
      options.policy ? options.policy() : std::make_unique<EarliestFinishPolicy>(EarliestFinishPolicy::Options{});
  Simulation simulation(trace, costs, options, workers, std::move(policy));
  if (auto served = simulation.run(); !served) return served.error();
  return Report{simulation.figures()};
}

}  // namespace ditfleet::simulation
