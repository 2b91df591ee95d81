#include "coordinator/scheduling/service/fleet_log.h"

#include <array>
#include <iterator>
#include <string_view>
#include <utility>

namespace ditfleet::scheduling {
namespace {

constexpr std::size_t kNamed = 5;  // workers per line

struct Wording {
  std::string_view one, many;
  bool warning, counts_held;
};
// By WorkerState; the last is for a worker that was silent and is ready again.
constexpr Wording kWordings[] = {{"registered and is starting", "registered and are starting", false, false},
                                 {"is ready", "are ready", false, false},
                                 {"is draining", "are draining", false, true},
                                 {"is silent", "are silent", true, true},
                                 {"is stuck", "are stuck", true, true},
                                 {"runs a unit for far longer than predicted and gets no other",
                                  "run units for far longer than predicted and get no others", true, false},
                                 {"fails units that succeed elsewhere and gets one at a time, as a probe",
                                  "fail units that succeed elsewhere and get one at a time, as a probe", true, false},
                                 {"is gone", "are gone", false, true},
                                 {"sends heartbeats again", "send heartbeats again", false, false}};
constexpr std::size_t kHeartbeatsAgain = std::size(kWordings) - 1;
static_assert(static_cast<std::size_t>(WorkerState::kGone) + 1 == kHeartbeatsAgain);

struct Change {
  std::vector<std::string> names;
  std::size_t held = 0;
  std::string detail;  // added if the line is about one worker
};

std::string line_of(const Wording& wording, const Change& change) {
  std::string text = "worker '" + change.names.front() + "' " + std::string(wording.one) + change.detail;
  if (change.names.size() > 1) {
    text = std::to_string(change.names.size()) + " workers " + std::string(wording.many) + ": ";
    for (std::size_t i = 0; i < change.names.size() && i < kNamed; ++i)
      text += (i > 0 ? ", '" : "'") + change.names[i] + "'";
    if (change.names.size() > kNamed) text += ", …";
  }
  if (wording.counts_held && change.held > 0)
    text += ", with " + std::to_string(change.held) + (change.held == 1 ? " unit" : " units");
  return text;
}

}  // namespace

std::optional<FleetLine> line_of_lost(const queue::Event& event) {
  const std::string unit = "unit " + event.job + "/" + std::to_string(event.unit);
  if (event.type == "ready" && event.field("reason") == "lease lapsed") {
    const auto owner = event.field("owner");
    return FleetLine{true, unit + ": the lease of worker '" + std::string(queue::worker_name(owner)) +
                               "' expired; the unit is ready again"};
  }
  if (event.type == "failed" && event.field("reason") == "workers lost")
    return FleetLine{true, unit + " failed: " + event.field("message")};
  return std::nullopt;
}

std::vector<FleetLine> FleetLog::look(const Fleet& fleet, std::int64_t now_us) {
  std::map<std::string, Seen> now;
  std::map<std::string, std::size_t> held;  // by owner, also of those that are gone
  std::array<Change, std::size(kWordings)> changes;
  for (WorkerId w = 0; w < fleet.id_bound(); ++w) {
    const auto& worker = fleet.at(w);
    if (worker.owner.empty()) continue;
    held[worker.owner] = worker.held.size();
    if (worker.state == WorkerState::kGone) continue;
    now[worker.owner] = {worker.name, worker.state, worker.heartbeat_us};
  }
  const auto add = [&](std::size_t kind, const std::string& owner, const Seen& worker) {
    changes[kind].names.push_back(worker.name);
    changes[kind].held += held[owner];
    if (kind == static_cast<std::size_t>(WorkerState::kSilent))
      changes[kind].detail = ": no heartbeat for " + std::to_string((now_us - worker.heartbeat_us) / 1'000'000) + " s";
  };
  for (const auto& [owner, worker] : now) {
    const auto before = seen_.find(owner);
    if (before != seen_.end() && before->second.state == worker.state) continue;
    const bool again =
        worker.state == WorkerState::kReady && before != seen_.end() && before->second.state == WorkerState::kSilent;
    add(again ? kHeartbeatsAgain : static_cast<std::size_t>(worker.state), owner, worker);
  }
  for (const auto& [owner, worker] : seen_) {
    if (!now.contains(owner)) add(static_cast<std::size_t>(WorkerState::kGone), owner, worker);
  }
  seen_ = std::move(now);
  std::vector<FleetLine> lines;
  if (!std::exchange(looked_, true)) return lines;
  for (std::size_t i = 0; i < changes.size(); ++i) {
    if (!changes[i].names.empty()) lines.push_back({kWordings[i].warning, line_of(kWordings[i], changes[i])});
  }
  return lines;
}

}  // namespace ditfleet::scheduling
