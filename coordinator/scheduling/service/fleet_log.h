// Log lines about workers that register, leave or fall silent, and about units of lost workers. Workers with the same
// change share a line, so that a large fleet logs few lines.
//
// No I/O, no clock; not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/scheduling/placement/fleet.h"

namespace ditfleet::scheduling {

struct FleetLine {
  bool warning = false;
  std::string text;
};

class FleetLog {
 public:
  // Lines about the changes since the previous call. The first call returns none.
  std::vector<FleetLine> look(const Fleet& fleet, std::int64_t now_us);

 private:
  struct Seen {
    std::string name;
    WorkerState state = WorkerState::kGone;
    std::int64_t heartbeat_us = 0;
  };
  std::map<std::string, Seen> seen_;  // by owner
  bool looked_ = false;
};

// The line for a unit whose worker was lost; nothing for other events.
std::optional<FleetLine> line_of_lost(const queue::Event& event);

}  // namespace ditfleet::scheduling
