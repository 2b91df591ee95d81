// The process's log on standard error: text lines or one JSON object per line.
#pragma once

#include <string>

#include "shared/core/result.h"

namespace ditfleet::telemetry {

// A message is always one line: control characters are escaped.
// level: trace, debug, info, warn, error or off. format: text or json ({"time","level","program","pid",
// "message"}, time in UTC with microseconds). kInvalidArgument for any other value. Call it once, before threads log.
Result<void> configure_log(const std::string& program, const std::string& level, const std::string& format);

}  // namespace ditfleet::telemetry
