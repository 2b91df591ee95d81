// The process's log on standard error, as text or as one JSON object per line.
#pragma once

#include <string>

#include "shared/core/result.h"

namespace ditfleet::telemetry {

// Configures the log. Control characters are escaped, so a message is always one line. `level` is trace, debug, info,
// warn, error or off. `format` is text or json ({"time","level","program","pid","message"}, time in UTC with
// microseconds). kInvalidArgument for other values. Call this once, before threads log.
Result<void> configure_log(const std::string& program, const std::string& level, const std::string& format);

}  // namespace ditfleet::telemetry
