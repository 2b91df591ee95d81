// Follows one job's events to its end and reconnects when the connection is lost.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "coordinator/cli/http_client.h"
#include "coordinator/cli/terminal.h"
#include "shared/core/json.h"

namespace ditfleet::cli {

// An error unless the text may be a job's id.
Result<void> check_job_id(const std::string& id);

bool is_terminal_event(const ServerEvent& event);  // of the job as a whole: succeeded failed canceled …

// Calls `on_event` once for each event of the job, starting with the first, and returns when the job has ended. If the
// connection is lost, tries to reconnect for up to 30 s. `with_progress`: also events of the type "progress".
// Errors: kCanceled (interrupted), those of HttpClient::events().
Result<void> watch_job(HttpClient& client, const std::string& id, bool with_progress,
                       const std::function<void(const ServerEvent&)>& on_event);

// "2 jobs ahead, 12 s left", "12 s left"; empty while nothing is known. Of a job or a progress event.
std::string outlook_text(const json::value& job);

// What a job of `units` images has reached, as one line: "[####........] 57/120 steps, image 1 of 2, 12 s left".
class JobProgress {
 public:
  JobProgress(bool quiet, std::int64_t units) : line_(quiet), units_(units) {}
  void on_event(const ServerEvent& event);
  void clear() { line_.clear(); }
  bool shown() const { return line_.shown(); }

 private:
  ProgressLine line_;
  std::int64_t units_, ended_ = 0, total_ = 0;    // total_: steps of a unit; 0: unknown
  std::map<std::int64_t, std::int64_t> reached_;  // steps, by unit
  double part_ = -1;                              // of the work, as the service reports it; negative: unknown
  bool decoding_ = false;
  std::string state_, outlook_;
};

// Follows a job that this command has submitted, with a progress line unless `quiet`, and returns the job that ended.
// `submitted`: the answer of POST /v1/jobs. An interruption (InterruptGuard) cancels the job: kCanceled.
Result<json::value> await_own_job(HttpClient& client, const json::value& submitted, bool quiet);

// "12:00:01.250 unit 0 started on host-7": one event as a line.
std::string event_line(const ServerEvent& event);

}  // namespace ditfleet::cli
