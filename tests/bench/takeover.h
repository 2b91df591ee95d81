// A new leader with a long backlog.
#pragma once

#include <string>

#include "shared/core/result.h"

namespace ditfleet::bench {

// Admits 4,000 jobs of 25 units with prompts of 16 KiB, and then starts a scheduler and a worker. Returns the seconds
// until the worker starts its first unit. kDeadlineExceeded: it started none within two minutes.
Result<double> takeover_seconds(const std::string& redis_url);

}  // namespace ditfleet::bench
