// What the log says of workers that come, go and fall silent, and of the units that lost ones leave. Of workers a line
// for each kind of change, so that a fleet that changes at once is a few lines, not a thousand.
//
// Pure and not thread safe.
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
  // What changed since the look before; the first says nothing, for nothing is known to have changed.
  std::vector<FleetLine> look(const Fleet& fleet, std::int64_t now_us);

 private:
  struct Seen {
    std::string name;
    WorkerState state = WorkerState::kGone;
  };
  std::map<std::string, Seen> seen_;  // by owner
  bool looked_ = false;
};

// What a worker that was lost in the midst of a unit cannot say of it any more; nothing where the event is another.
std::optional<FleetLine> line_of_lost(const queue::Event& event);

}  // namespace ditfleet::scheduling
