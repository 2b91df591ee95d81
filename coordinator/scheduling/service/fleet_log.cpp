#include "coordinator/scheduling/service/fleet_log.h"

#include <array>
#include <utility>

namespace ditfleet::scheduling {
namespace {

constexpr std::size_t kNamed = 5;  // workers per line

struct Change {
  std::string what;      // "is ready"
  std::string what_all;  // "are ready"
  bool warning = false;
  bool counts_held = false;
  std::vector<std::string> names;
  std::size_t held = 0;
};
enum Kind { kRegistered, kReady, kHeartbeatsAgain, kDraining, kSilent, kStuck, kOverdue, kProbing, kGone };

std::string line_of(const Change& change) {
  std::string text = change.names.size() == 1 ? "worker " : std::to_string(change.names.size()) + " workers ";
  if (change.names.size() > 1) text += change.what_all + ": ";
  for (std::size_t i = 0; i < change.names.size() && i < kNamed; ++i)
    text += (i > 0 ? ", '" : "'") + change.names[i] + "'";
  if (change.names.size() > kNamed) text += ", …";
  if (change.names.size() == 1) text += " " + change.what;
  if (change.counts_held && change.held > 0) {
    text += ", with " + std::to_string(change.held) + (change.held == 1 ? " unit" : " units");
  }
  return text;
}

std::string field(const queue::Event& event, const char* name) {
  const auto it = event.fields.find(name);
  return it == event.fields.end() ? std::string() : it->second;
}

}  // namespace

std::optional<FleetLine> line_of_lost(const queue::Event& event) {
  const std::string unit = "unit " + event.job + "/" + std::to_string(event.unit);
  if (event.type == "ready" && field(event, "reason") == "lease lapsed") {
    const auto owner = field(event, "owner");
    return FleetLine{true, unit + ": the lease of worker '" + std::string(queue::worker_name(owner)) +
                               "' expired; the unit is ready again"};
  }
  if (event.type == "failed" && field(event, "reason") == "workers lost")
    return FleetLine{true, unit + " failed: " + field(event, "message")};
  return std::nullopt;
}

std::vector<FleetLine> FleetLog::look(const Fleet& fleet, std::int64_t now_us) {
  std::map<std::string, Seen> now;
  std::map<std::string, std::size_t> held;  // by owner, also of those that are gone
  std::string silent_for;
  for (WorkerId w = 0; w < fleet.id_bound(); ++w) {
    const auto& worker = fleet.at(w);
    if (worker.owner.empty()) continue;
    held[worker.owner] = worker.held.size();
    if (worker.state == WorkerState::kGone) continue;
    now[worker.owner] = {worker.name, worker.state};
    if (worker.state == WorkerState::kSilent)
      silent_for = std::to_string((now_us - worker.heartbeat_us) / 1'000'000) + " s";
  }
  std::array<Change, 9> changes{{{"registered and is starting", "registered and are starting", false, false, {}, 0},
                                 {"is ready", "are ready", false, false, {}, 0},
                                 {"sends heartbeats again", "send heartbeats again", false, false, {}, 0},
                                 {"is draining", "are draining", false, true, {}, 0},
                                 {"is silent: no heartbeat for " + silent_for, "are silent", true, true, {}, 0},
                                 {"is stuck", "are stuck", true, true, {}, 0},
                                 {"runs a unit for far longer than predicted and gets no other",
                                  "run units for far longer than predicted and get no others",
                                  true,
                                  false,
                                  {},
                                  0},
                                 {"fails units that succeed elsewhere and gets one at a time, as a probe",
                                  "fail units that succeed elsewhere and get one at a time, as a probe",
                                  true,
                                  false,
                                  {},
                                  0},
                                 {"is gone", "are gone", false, true, {}, 0}}};
  const auto add = [&](Kind kind, const std::string& owner, const Seen& worker) {
    changes[kind].names.push_back(worker.name);
    changes[kind].held += held[owner];
  };
  for (const auto& [owner, worker] : now) {
    const auto before = seen_.find(owner);
    if (before != seen_.end() && before->second.state == worker.state) continue;
    switch (worker.state) {
      case WorkerState::kStarting: add(kRegistered, owner, worker); break;
      case WorkerState::kReady:
        add(before != seen_.end() && before->second.state == WorkerState::kSilent ? kHeartbeatsAgain : kReady, owner,
            worker);
        break;
      case WorkerState::kDraining: add(kDraining, owner, worker); break;
      case WorkerState::kSilent: add(kSilent, owner, worker); break;
      case WorkerState::kStuck: add(kStuck, owner, worker); break;
      case WorkerState::kOverdue: add(kOverdue, owner, worker); break;
      case WorkerState::kProbing: add(kProbing, owner, worker); break;
      case WorkerState::kGone: break;  // not among them
    }
  }
  for (const auto& [owner, worker] : seen_) {
    if (!now.contains(owner)) add(kGone, owner, worker);
  }
  seen_ = std::move(now);
  std::vector<FleetLine> lines;
  if (std::exchange(looked_, true)) {
    for (const auto& change : changes) {
      if (!change.names.empty()) lines.push_back({change.warning, line_of(change)});
    }
  }
  return lines;
}

}  // namespace ditfleet::scheduling
