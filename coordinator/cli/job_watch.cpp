#include "coordinator/cli/job_watch.h"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <thread>

#include "coordinator/cli/json_fields.h"
#include "shared/core/deadline.h"
#include "shared/core/ids.h"
#include "shared/core/wall_clock.h"
#include "shared/job/state.h"

namespace ditfleet::cli {
namespace {

constexpr auto kReconnectFor = std::chrono::seconds(30);

std::string clock_text(std::int64_t ms) {
  const std::time_t seconds = ms / 1000;
  std::tm local{};
  ::localtime_r(&seconds, &local);
  return fmt::format("{:02}:{:02}:{:02}.{:03}", local.tm_hour, local.tm_min, local.tm_sec, ms % 1000);
}

}  // namespace

Result<void> check_job_id(const std::string& id) {
  if (is_valid_id(id)) return {};
  return invalid_argument("'" + id +
                          "' is not a job id; it must have 1 to 64 letters, digits, dots, dashes or underscores");
}

bool is_terminal_event(const ServerEvent& event) {
  const auto state = job::state_from_name(event.type);
  if (!state || !job::is_terminal(*state)) return false;
  const auto data = parse_json(event.data);
  return data && !field(*data, "unit").is_number();
}

Result<void> watch_job(HttpClient& client, const std::string& id, bool with_progress,
                       const std::function<void(const ServerEvent&)>& on_event) {
  std::string last_id;
  bool ended = false;
  Deadline deadline = Deadline::after(kReconnectFor);
  while (!ended) {
    const std::string before = last_id;
    auto followed = client.events("/v1/jobs/" + id + "/events" + (with_progress ? "?progress=true" : ""), last_id, {},
                                  [&](const ServerEvent& event) {
                                    on_event(event);
                                    ended = is_terminal_event(event);
                                    return ended ? HttpClient::Next::kStop : HttpClient::Next::kGoOn;
                                  });
    if (ended) break;
    if (last_id != before) deadline = Deadline::after(kReconnectFor);
    if (!followed && !is_retryable(followed.error().code)) return followed.error();
    if (deadline.passed()) {
      if (!followed) return followed.error();
      return unavailable("the service repeatedly closed the event stream of job " + id + " before the job ended");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    if (InterruptGuard::interrupted()) return Error{Code::kCanceled, "interrupted", {}};
  }
  return {};
}

std::string outlook_text(const json::value& job) {
  std::string out;
  if (const json::value& position = field(job, "position"); position.is_number()) {
    const auto ahead = integer(job, "position");
    out = ahead == 0 ? "next" : fmt::format("{} job{} ahead", ahead, ahead == 1 ? "" : "s");
  }
  if (const auto eta_ms = integer(job, "eta_ms"); eta_ms > 0) {
    const std::string left = whole_seconds(eta_ms - unix_ms());
    if (left != "now") out += (out.empty() ? "" : ", ") + left + " left";
  }
  return out;
}

void JobProgress::on_event(const ServerEvent& event) {
  const auto data = line_.shown() ? parse_json(event.data) : Result<json::value>(json::value());
  if (!line_.shown() || !data) return;
  const auto unit = integer(*data, "unit", -1);
  if (event.type == "step") {
    total_ = integer(*data, "total");
    auto& reached = reached_[unit];
    reached = std::max(reached, integer(*data, "step"));
    decoding_ = reached >= total_;
  } else if (event.type == "progress") {
    const json::value& part = field(*data, "progress");
    if (part.is_number()) part_ = part.to_number<double>();
    outlook_ = outlook_text(*data);
    state_ = text(*data, "state");
  } else if (unit >= 0 && event.type == "succeeded") {
    reached_[unit] = total_;
    decoding_ = false;
    if (++ended_ == units_) part_ = 1, outlook_.clear();
  } else if (event.type != "preview") {
    state_ = event.type;
  }
  std::string what = state_;
  if (total_ > 0) {
    std::int64_t done = 0;
    for (const auto& [one, steps] : reached_) done += steps;
    what = fmt::format("{}/{} steps", done, units_ * total_);
    if (units_ > 1) what += fmt::format(", image {} of {}", std::min(ended_ + 1, units_), units_);
    if (decoding_) what += ", decoding";
  }
  line_.draw(total_ > 0 ? part_ : -1, what + (outlook_.empty() ? "" : ", " + outlook_));
}

Result<json::value> await_own_job(HttpClient& client, const json::value& submitted, bool quiet) {
  const std::string id = text(submitted, "id");
  JobProgress progress(quiet, integer(submitted, "units", 1));
  const auto watched =
      watch_job(client, id, progress.shown(), [&](const ServerEvent& event) { progress.on_event(event); });
  progress.clear();
  if (watched) return client.json("GET", "/v1/jobs/" + id);
  if (watched.error().code != Code::kCanceled) return watched.error();
  InterruptGuard::clear();
  (void)client.request("DELETE", "/v1/jobs/" + id, {}, std::chrono::seconds(5));
  return Error{Code::kCanceled, "interrupted; job " + id + " was canceled", {}};
}

std::string event_line(const ServerEvent& event) {
  const auto parsed = parse_json(event.data);
  const json::value data = parsed ? *parsed : json::value(nullptr);
  std::string line = clock_text(integer(data, "at_ms"));
  if (field(data, "unit").is_number()) line += " unit " + text(data, "unit");
  line += " " + event.type;
  if (event.type == "step") line += " " + text(data, "step") + "/" + text(data, "total");
  if (const std::string worker = text(data, "worker"); !worker.empty()) line += " on " + worker;
  for (const char* name : {"reason", "code", "message", "url"}) {
    if (const std::string value = text(data, name); !value.empty())
      line += std::string(name == std::string("reason") ? " because " : " ") + one_line(value, 300);
  }
  return line;
}

}  // namespace ditfleet::cli
