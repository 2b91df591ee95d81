#include "shared/job/state.h"

#include <array>
#include <cstddef>

namespace ditfleet::job {
namespace {
constexpr std::array<std::string_view, 11> kNames = {"queued",   "paused",    "ready",     "assigned",
                                                     "running",  "canceling", "succeeded", "failed",
                                                     "canceled", "expired",   "rejected"};
}

std::string_view state_name(State state) { return kNames[static_cast<std::size_t>(state)]; }

std::optional<State> state_from_name(std::string_view name) {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return static_cast<State>(i);
  }
  return std::nullopt;
}

bool is_terminal(State state) { return state >= State::kSucceeded; }

}  // namespace ditfleet::job
