// Follows one job's events to its end and reconnects when the connection is lost.
#pragma once

#include <functional>
#include <string>

#include "coordinator/cli/http_client.h"

namespace ditfleet::cli {

// An error unless the text may be a job's id.
Result<void> check_job_id(const std::string& id);

bool is_terminal_event(const ServerEvent& event);  // of the job as a whole: succeeded failed canceled …

// Calls `on_event` once for each event of the job, starting with the first, and returns when the job has ended. If the
// connection is lost, tries to reconnect for up to 30 s.
// Errors: kCanceled (interrupted), those of HttpClient::events().
Result<void> watch_job(HttpClient& client, const std::string& id,
                       const std::function<void(const ServerEvent&)>& on_event);

// "12:00:01.250 unit 0 started on host-7": one event as a line.
std::string event_line(const ServerEvent& event);

}  // namespace ditfleet::cli
