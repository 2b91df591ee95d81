// The states of jobs and units. Redis and all APIs use the same names.
#pragma once

#include <optional>
#include <string_view>

namespace ditfleet::job {

// Until its last unit has ended, a job has the state of its most advanced unit. An ended job has failed if any unit
// failed, else has expired if any unit expired, else is canceled if any unit was canceled, else has succeeded.
// kPaused: it waits until it is resumed; a job if none of its open units is in another state.
// kCanceling: it runs, and was asked to stop.
enum class State {
  kQueued,
  kPaused,
  kReady,
  kAssigned,
  kRunning,
  kCanceling,
  kSucceeded,
  kFailed,
  kCanceled,
  kExpired,
  kRejected
};

std::string_view state_name(State state);  // "queued"
std::optional<State> state_from_name(std::string_view name);
bool is_terminal(State state);

}  // namespace ditfleet::job
