// A scheduler, and a model of Redis that performs its actions.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <set>

#include "coordinator/scheduling/scheduler.h"
#include "tests/fixtures/image_model.h"

namespace ditfleet::scheduling {

constexpr std::int64_t kMs = 1'000;
constexpr std::int64_t kStart = 1'000'000'000'000;  // any time

inline job::Catalogue catalogue() {
  job::Catalogue out;
  job::ModelEntry entry = job::image_model("tiny", 256, 4);
  entry.defaults.set("max_sequence_length", 64);
  out.models["tiny"] = entry;
  entry.name = "other";
  out.models["other"] = entry;
  out.default_model = "tiny";
  return out;
}

// The stored units, changed as the queue's Functions would change them, and the events they would send.
struct Store {
  std::map<queue::UnitRef, queue::UnitView> open;
  std::vector<queue::Event> events;
  std::vector<queue::Rejection> rejected;
  std::vector<std::pair<queue::UnitRef, std::string>> assignments;  // and the owner
  std::vector<queue::UnitRef> revoked;

  void event(const queue::UnitRef& ref, std::string type, std::int64_t now,
             std::map<std::string, std::string> fields = {}) {
    events.push_back(
        {.job = ref.job, .type = std::move(type), .unit = ref.unit, .at_ms = now / 1000, .fields = std::move(fields)});
  }
  void perform(const Actions& actions, Scheduler& scheduler, std::int64_t now) {
    for (const auto& r : actions.reject) rejected.push_back(r);
    for (const auto& a : actions.admit) {
      for (int i = 0; i < a.units; ++i) {
        queue::UnitView view{.ref = {a.id, i}, .tenant = a.tenant, .class_key = a.class_key, .steps = a.steps};
        view.model = a.class_key.substr(0, a.class_key.find('/'));
        view.adapters = a.adapters;
        view.cost_us = a.cost_us;
        view.priority = a.priority;
        view.deadline_ms = a.deadline_ms;
        view.created_ms = view.ready_ms = now / 1000;
        open[view.ref] = view;
        event(view.ref, "ready", now);
      }
    }
    for (const auto& batch : actions.assign) {
      for (const auto& unit : batch.units) {
        auto it = open.find(unit.ref);
        if (it == open.end() || it->second.state != job::State::kReady) {
          scheduler.on_assign_refused(unit.ref, unit.nonce, now);
          continue;
        }
        it->second.state = job::State::kAssigned;
        it->second.owner = batch.owner;
        it->second.nonce = unit.nonce;
        assignments.emplace_back(unit.ref, batch.owner);
        event(unit.ref, "assigned", now,
              {{"worker", batch.owner.substr(0, batch.owner.find(':'))}, {"reason", unit.reason}});
      }
    }
    for (const auto& attempt : actions.revoke) {
      auto it = open.find(attempt.ref);
      if (it == open.end() || it->second.state != job::State::kAssigned || it->second.nonce != attempt.nonce) continue;
      ready(attempt.ref, now);
      revoked.push_back(attempt.ref);
    }
    for (const auto& attempt : actions.lost) {
      auto it = open.find(attempt.ref);
      if (it == open.end() || it->second.state != job::State::kAssigned || it->second.nonce != attempt.nonce) continue;
      lapse(attempt.ref, now);
      revoked.push_back(attempt.ref);
    }
  }
  void ready(const queue::UnitRef& ref, std::int64_t now, const std::string& reason = "revoked") {
    auto& view = open.at(ref);
    view.state = job::State::kReady;
    view.owner.clear();
    view.nonce.clear();
    view.ready_ms = now / 1000;
    std::map<std::string, std::string> fields{{"reason", reason}};
    if (view.lapses > 0) fields["lapses"] = std::to_string(view.lapses);
    for (const auto& name : view.failed_on) fields["failed_on"] += (fields["failed_on"].empty() ? "" : ",") + name;
    event(ref, "ready", now, std::move(fields));
  }
  void pause(const queue::UnitRef& ref, std::int64_t now) {
    ready(ref, now, "paused");
    open.at(ref).not_before_ms = queue::kPausedUntilMs;
    events.back().fields["not_before_ms"] = std::to_string(queue::kPausedUntilMs);
  }
  // The lease of the unit's worker has lapsed.
  void lapse(const queue::UnitRef& ref, std::int64_t now) {
    auto& view = open.at(ref);
    ++view.lapses;
    if (view.state == job::State::kRunning) failed_on(view);
    ready(ref, now, "lease lapsed");
  }
  // The unit failed with a retryable error; its retry is due at once.
  void fail(const queue::UnitRef& ref, std::int64_t now) {
    auto& view = open.at(ref);
    failed_on(view);
    ready(ref, now, "retry");
    events.back().fields["not_before_ms"] = std::to_string(now / 1000);
    ready(ref, now, "retry is due");
  }
  static void failed_on(queue::UnitView& view) {
    const std::string name(queue::worker_name(view.owner));
    std::erase(view.failed_on, name);
    view.failed_on.insert(view.failed_on.begin(), name);
  }
  void start(const queue::UnitRef& ref, std::int64_t now) {
    open.at(ref).state = job::State::kRunning;
    event(ref, "started", now, {{"attempt", "1"}});
  }
  // By value: `ref` may be a key of `open`.
  void finish(queue::UnitRef ref, std::int64_t now, const std::string& type = "succeeded") {
    open.erase(ref);
    event(ref, type, now);
    const auto next = open.lower_bound({ref.job, 0});
    if (next == open.end() || next->first.job != ref.job) event({ref.job, -1}, type, now);
  }
  std::vector<queue::UnitView> views() const {
    std::vector<queue::UnitView> out;
    for (const auto& [ref, view] : open) out.push_back(view);
    return out;
  }
};

class SchedulerTest : public ::testing::Test {
 protected:
  std::unique_ptr<Scheduler> make(std::int64_t age_bound_ms = 60'000) {
    SchedulerOptions options;
    options.catalogue = catalogue();
    options.age_bound_ms = age_bound_ms;
    options.new_nonce = [this] { return "n" + std::to_string(++nonces); };
    return std::make_unique<Scheduler>(options);
  }
  void SetUp() override { scheduler = make(); }

  queue::WorkerInfo worker(const std::string& name, const std::string& state = "ready") const {
    queue::WorkerInfo info;
    info.name = name;
    info.boot = "1";
    info.state = state;
    info.models = {"tiny"};
    info.heartbeat_ms = now / 1000;
    return info;
  }
  void workers(const std::vector<std::string>& names) {
    std::vector<queue::WorkerInfo> infos;
    for (const auto& name : names) infos.push_back(worker(name));
    scheduler->on_workers(infos, now);
  }
  void submit(const std::string& id, const std::string& spec = R"({"model":"tiny","prompt":"x","seed":1})",
              const std::string& tenant = "default") {
    scheduler->on_intake(std::vector{entry(id, spec, tenant)}, now);
    settle();
  }
  queue::IntakeEntry entry(const std::string& id, const std::string& spec = R"({"model":"tiny","prompt":"x","seed":1})",
                           const std::string& tenant = "default") {
    queue::IntakeEntry out;
    out.entry_id = "1-" + std::to_string(++entries);
    out.id = id;
    out.tenant = tenant;
    out.spec = spec;
    out.created_ms = now / 1000;
    return out;
  }
  // Performs actions and feeds back events until there are none.
  void settle() {
    for (int i = 0; i < 100; ++i) {
      const auto actions = scheduler->decide(now);
      store.perform(actions, *scheduler, now);
      const auto events = std::exchange(store.events, {});
      for (const auto& event : events) scheduler->on_event(event, now);
      if (actions.empty() && events.empty()) return;
    }
    FAIL() << "the scheduler does not settle";
  }
  std::string owner_of(const std::string& job, int unit = 0) const {
    const auto it = store.open.find({job, unit});
    return it == store.open.end() ? "ended" : it->second.owner;
  }
  std::int64_t time_of(const std::string& tenant) const {
    const auto& tenants = scheduler->tenants();
    return tenants.virtual_time(tenants.find(tenant).value());
  }
  static std::string spec(const std::string& fields) {
    return R"({"model":"tiny","prompt":"x","seed":1,)" + fields + "}";
  }

  std::int64_t now = kStart;
  int nonces = 0, entries = 0;
  Store store;
  std::unique_ptr<Scheduler> scheduler;
};

// Jobs may name any adapters; their names serve as digests. Workers have slots for them.
class NamedAdaptersTest : public SchedulerTest {
 protected:
  void SetUp() override {
    SchedulerOptions options;
    options.catalogue = catalogue();
    options.adapters = [](const std::string&, const job::LoraUse& use, const job::ModelEntry&) {
      return Result<std::string>(use.name);
    };
    options.new_nonce = [this] { return "n" + std::to_string(++nonces); };
    scheduler = std::make_unique<Scheduler>(options);
  }
  queue::WorkerInfo with_slots(const std::string& name, int slots, const std::string& state = "ready") const {
    auto info = worker(name, state);
    info.adapter_slots = slots;
    info.host_adapter_bytes = 10'000'000'000;
    return info;
  }
};

}  // namespace ditfleet::scheduling
