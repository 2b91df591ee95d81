// Follows one job's events to its end, over lost connections.
#pragma once

#include <functional>
#include <string>

#include "coordinator/cli/http_client.h"

namespace ditfleet::cli {

bool is_terminal_event(const ServerEvent& event);  // of the job as a whole: succeeded failed canceled …

// Calls `on_event` for each event from the job's first, each once, and returns when the job has ended.
// Reconnects from the last event for up to 30 s of no connection; kCanceled: interrupted.
Result<void> watch_job(HttpClient& client, const std::string& id,
                       const std::function<void(const ServerEvent&)>& on_event);

// "12:00:01.250 unit 0 started on host-7": one event as a line.
std::string event_line(const ServerEvent& event);

}  // namespace ditfleet::cli
