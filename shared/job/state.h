// The states of jobs and of their units, as stored in Redis and spelled in every API.
#pragma once

#include <optional>
#include <string_view>

namespace ditfleet::job {

// A job's state is that of its furthest unit until the last one has ended; it then fails if any unit
// failed, else is expired or canceled if any unit was, else has succeeded.
enum class State { kQueued, kReady, kAssigned, kRunning, kSucceeded, kFailed, kCanceled, kExpired, kRejected };

std::string_view state_name(State state);  // "queued"
std::optional<State> state_from_name(std::string_view name);
bool is_terminal(State state);

}  // namespace ditfleet::job
