// A new leader with a long backlog.
#pragma once

#include <string>

#include "shared/core/result.h"

namespace ditfleet::bench {

struct Takeover {
  double first_start_s = 0;    // until the worker starts its first unit
  double longest_call_ms = 0;  // of a call to Redis meanwhile, as Redis measures it
};
// Admits 4,000 jobs of 25 units with prompts of 16 KiB, and then starts a scheduler and a worker. kDeadlineExceeded:
// the worker started nothing within two minutes.
Result<Takeover> take_over(const std::string& redis_url);

}  // namespace ditfleet::bench
