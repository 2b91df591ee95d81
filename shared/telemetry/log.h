// The process's log, on standard error: lines for people or one JSON object a line.
#pragma once

#include <string>

#include "shared/core/result.h"

namespace ditfleet::telemetry {

// A message is one line in either format: control characters are written as escapes.
// level: trace, debug, info, warn, error or off. format: text or json ({"time","level","program","pid",
// "message"}, time in UTC with microseconds). kInvalidArgument for others. Call it once, before threads log.
Result<void> configure_log(const std::string& program, const std::string& level, const std::string& format);

}  // namespace ditfleet::telemetry
