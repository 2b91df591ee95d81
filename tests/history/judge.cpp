#include "tests/history/judge.h"

#include <algorithm>
#include <charconv>

#include "shared/core/text.h"
#include "shared/queue/keys.h"
#include "shared/queue/records.h"
#include "shared/results/store.h"
#include "tests/fault/job_history.h"

namespace ditfleet::history {
namespace {

using Kind = PlannedFault::Kind;
using Nature = PlannedJob::Nature;

// The fields of a record of either format.
std::vector<std::string_view> parts(std::string_view record) {
  std::vector<std::string_view> out;
  if (record.starts_with("2:")) record.remove_prefix(record.find('|') + 1);
  for (;;) {
    const auto bar = record.find('|');
    out.push_back(record.substr(0, bar));
    if (bar == std::string_view::npos) return out;
    record.remove_prefix(bar + 1);
  }
}

std::int64_t number(std::string_view digits) {
  std::int64_t out = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), out);
  return out;
}

std::string job_of(std::string_view member) { return std::string(member.substr(0, member.rfind(':'))); }

template <class T>
const T& or_none(const T* value) {
  static const T none;
  return value ? *value : none;
}

// Which of the sorted sets must have a unit in this state: 0 ready, 1 delayed, 2 lease.
int home_of(std::string_view state) { return state == "ready" ? 0 : state == "delayed" ? 1 : 2; }

}  // namespace

std::string disagreement(RedisModel& redis) {
  const queue::Keys keys(0);
  const auto& units = or_none(redis.peek_as<Hash>(keys.units()));
  const auto& open = or_none(redis.peek_as<Hash>(keys.open()));
  const auto& specs = or_none(redis.peek_as<Hash>(keys.specs()));
  const auto& last = or_none(redis.peek_as<Hash>(keys.last()));
  const auto& intake = or_none(redis.peek_as<Stream>(keys.in()));
  const SortedSet* sets[] = {&or_none(redis.peek_as<SortedSet>(keys.ready())),
                             &or_none(redis.peek_as<SortedSet>(keys.delayed())),
                             &or_none(redis.peek_as<SortedSet>(keys.lease()))};
  static constexpr const char* kNames[] = {"ready", "delayed", "lease"};
  std::set<std::string> with_units;
  for (const auto& [member, record] : units) {
    const auto fields = parts(record);
    if (fields.size() < 12) return "the record of unit " + member + " is " + record;
    const int home = home_of(fields[0]);
    for (int i = 0; i < 3; ++i)
      if (sets[i]->scores.contains(member) != (i == home))
        return "unit " + member + " is " + std::string(fields[0]) + (i == home ? " and not in " : " and in ") +
               kNames[i];
    if ((home == 2) == fields[1].empty())
      return "unit " + member + " is " + std::string(fields[0]) + " with nonce '" + std::string(fields[1]) + "'";
    if (!last.contains(member)) return "unit " + member + " has no last event";
    with_units.insert(job_of(member));
  }
  for (int i = 0; i < 3; ++i)
    for (const auto& [member, score] : sets[i]->scores)
      if (!units.contains(member)) return "unit " + member + " is in " + kNames[i] + " and has no record";
  std::map<std::string, std::int64_t> use;
  for (const auto& [id, record] : open) {
    const auto fields = parts(record);
    if (fields.size() < 11) return "the record of job " + id + " is " + record;
    const bool admitted = fields[0] != "0";
    if (admitted != with_units.contains(id))
      return "job " + id + (admitted ? " is admitted and has no open unit" : " is queued and has units");
    if (admitted != specs.contains(id))
      return "job " + id + (admitted ? " has no spec" : " has a spec before its admission");
    if (!admitted) {
      const auto entry = fields[5];
      const auto dash = entry.find('-');
      const StreamId at{static_cast<std::uint64_t>(number(entry.substr(0, dash))),
                        static_cast<std::uint64_t>(number(entry.substr(dash + 1)))};
      if (!intake.entries.contains(at)) return "job " + id + " is queued and not in the intake";
      if (!last.contains(id)) return "job " + id + " has no last event";
    }
    use[std::string(fields[6])] += number(fields[9]);
  }
  for (const auto& id : with_units)
    if (!open.contains(id)) return "job " + id + " has units and is not open";
  for (const auto& [id, spec] : specs)
    if (!open.contains(id)) return "job " + id + " has a spec and is not open";
  for (const auto& [member, event] : last)
    if (!units.contains(member) && !open.contains(member)) return "'" + member + "' has a last event and is not open";
  for (const auto& [id, score] : or_none(redis.peek_as<SortedSet>(keys.deadline())).scores)
    if (!open.contains(id)) return "job " + id + " has a deadline and is not open";
  for (const auto& member : or_none(redis.peek_as<Set>(keys.paused()))) {
    const auto unit = units.find(member);
    if (member.find(':') != std::string::npos && (unit == units.end() || parts(unit->second)[0] != "delayed"))
      return "unit " + member + " is paused and not delayed";
  }
  std::map<std::string, std::int64_t> counted;
  for (const auto& [tenant, sum] : or_none(redis.peek_as<Hash>(keys.use()))) counted[tenant] = number(sum);
  if (counted != use) return "the use of tenants is not that of their open jobs";
  return {};
}

namespace {

struct Told {
  std::map<std::string, std::vector<queue::Event>> events;  // by job
  std::string broken;
};

Told events_of(RedisModel& redis) {
  Told out;
  const auto& stream = or_none(redis.peek_as<Stream>(queue::Keys(0).events()));
  for (const auto& [id, fields] : stream.entries) {
    std::string_view lines = fields.at(1);
    while (!lines.empty()) {
      const auto end = lines.find('\n');
      auto event = queue::parse_feed_line(id.text(), lines.substr(0, end));
      lines = end == std::string_view::npos ? std::string_view() : lines.substr(end + 1);
      if (!event) {
        out.broken = "an event cannot be read: " + event.error().message;
        return out;
      }
      const std::string job = event->job;
      queue::append_events(std::move(*event), out.events[job]);
    }
  }
  return out;
}

// Whether the plan lets a job end so.
bool may_end(const Fleet& fleet, const Ordered& order, const std::string& state) {
  const Plan& plan = fleet.plan;
  const bool clock = plan.has(Kind::kClockStep);
  if (state == "canceled") return order.cancel_sent;
  if (state == "expired" || state == "rejected") return order.plan.deadline_in > 0;
  // Two workers that do not come back, or that are cut off until both have lost the unit: a lapse is forgiven when its
  // worker reports.
  int deaths = 0;
  for (const auto& fault : plan.faults) deaths += fault.kind == Kind::kKillWorker ? 1 : 0;
  for (const auto& job : plan.jobs)
    deaths += job.nature == Nature::kKillsWorkers || job.nature == Nature::kHangs ? job.units : 0;
  const bool unlucky = deaths >= 2 || plan.cut_offs() >= 2 || plan.losses() >= (deaths > 0 ? 2 : 3) || clock ||
                       plan.has(Kind::kBrokenStore) || plan.has(Kind::kSlowStore) || plan.has(Kind::kFailOver);
  switch (order.plan.nature) {
    case Nature::kFails: return state == "failed";
    case Nature::kKillsWorkers: return state == "failed";
    case Nature::kPlain:
    case Nature::kFailsOnce:
    case Nature::kHangs: return state == "succeeded" || (state == "failed" && unlucky);
  }
  return false;
}

std::string wrong_results(const Fleet& fleet, const Ordered& order, const Hash& record, std::set<std::string>& kept) {
  for (int unit = 0; unit < order.plan.units; ++unit) {
    const auto ended = record.find("u" + std::to_string(unit));
    if (ended == record.end()) {
      if (record.contains("l")) continue;  // the job ended before it had units
      return "unit " + std::to_string(unit) + " has no record";
    }
    const auto fields = parts(ended->second);
    if (fields[0] != "succeeded") continue;
    const auto text = record.find("m" + std::to_string(unit));
    if (text == record.end()) return "unit " + std::to_string(unit) + " has no manifest";
    const auto manifest = results::Manifest::parse(text->second);
    if (!manifest) return "the manifest of unit " + std::to_string(unit) + " is " + text->second;
    if (manifest->nonce != fields[1])
      return "the result of unit " + std::to_string(unit) + " is not of the attempt that completed it";
    const auto stored = fleet.store.find(manifest->key);
    if (stored == fleet.store.end()) return "the result of unit " + std::to_string(unit) + " is not stored";
    if (stored->second != std::to_string(order.seed + unit))
      return "the result of unit " + std::to_string(unit) + " is " + stored->second;
    kept.insert(manifest->key);
  }
  return {};
}

}  // namespace

std::string verdict(Fleet& fleet) {
  RedisModel& redis = fleet.redis.model();
  const queue::Keys keys(0);
  if (auto wrong = disagreement(redis); !wrong.empty()) return wrong;
  const Told told = events_of(redis);
  if (!told.broken.empty()) return told.broken;

  const Plan& plan = fleet.plan;
  std::set<std::string> known, kept;
  bool lost = false;
  int lapses = 0;
  for (const auto& [job, events] : told.events)
    for (const auto& event : events)
      if (event.type == "ready" && event.field("reason") == "lease lapsed") ++lapses;
  if (lapses > plan.lapses())
    return std::to_string(lapses) + " leases lapsed, of at most " + std::to_string(plan.lapses());
  for (const auto& order : fleet.orders) {
    known.insert(order.id);
    lost = lost || order.lost;
    const auto& record = or_none(redis.peek_as<Hash>(keys.job(order.id)));
    const auto state = record.find("state");
    if (state == record.end()) {
      if (order.lost) continue;
      return "job " + order.id + " was acknowledged and has no record";
    }
    if (!may_end(fleet, order, state->second)) {
      const auto error = record.find("error");
      return "job " + order.id + " (" + order.plan.text() + ") ended as " + state->second +
             (error == record.end() ? "" : ": " + error->second);
    }
    if (auto wrong = wrong_results(fleet, order, record, kept); !wrong.empty()) return "job " + order.id + ": " + wrong;
    const auto events = told.events.find(order.id);
    if (events == told.events.end()) return "job " + order.id + " has no events";
    if (auto wrong = testing::faults_in(events->second, {.max_attempts = 8}); !wrong.empty())
      return "job " + order.id + ": " + wrong;
    if (order.events.size() != events->second.size())
      return "job " + order.id + ": a client reads " + std::to_string(order.events.size()) + " of " +
             std::to_string(events->second.size()) + " events";
    for (const auto& [unit, killed] : order.failures)
      if (order.plan.nature == Nature::kKillsWorkers && killed > queue_options().max_crashes &&
          !plan.has(Kind::kFailOver))
        return "job " + order.id + ": unit " + std::to_string(unit) + " killed " + std::to_string(killed) + " workers";
    if (plan.faults.empty() && plan.losses() == 0 && order.plan.pause_after == 0) {
      std::map<int, int> starts;
      for (const auto& event : events->second)
        if (event.type == "started") ++starts[event.unit];
      for (const auto& [unit, count] : starts)
        if (count != (order.plan.nature == Nature::kFailsOnce ? 2 : 1))
          if (count > 1 + (order.plan.nature == Nature::kFailsOnce ? 1 : 0))
            return "job " + order.id + ": unit " + std::to_string(unit) + " started " + std::to_string(count) +
                   " times";
    }
  }
  for (const auto& [id, created] : or_none(redis.peek_as<SortedSet>(keys.jobs())).scores)
    if (!known.contains(id) && !lost) return "job " + id + " was made beside that of its order";

  for (const auto& key : redis.keys()) {
    if (key.starts_with("df:{0}:checkpoint:")) return key + " is left";
    const auto* stream = key.starts_with("df:{0}:mbox:") ? redis.peek_as<Stream>(key) : nullptr;
    if (stream && !stream->entries.empty() && plan.faults.empty() && plan.losses() == 0)
      return key + " has messages left";
  }
  const bool orphans =
      plan.losses() > 0 || plan.has(Kind::kDrainWorker) || plan.has(Kind::kSlowStore) || plan.has(Kind::kBrokenStore);
  for (const auto& [key, bytes] : fleet.store) {
    if (kept.contains(key) || orphans) continue;
    // The checkpoint of a job that ends while it is paused expires in a store of files.
    const auto of = std::find_if(fleet.orders.begin(), fleet.orders.end(),
                                 [&](const Ordered& order) { return key.starts_with(order.id + ":"); });
    const bool of_paused = key.size() - key.rfind(':') > 33 && of != fleet.orders.end() && of->plan.pause_after > 0;
    if (!of_paused) return "the result " + key + " is left";
  }
  return {};
}

}  // namespace ditfleet::history
