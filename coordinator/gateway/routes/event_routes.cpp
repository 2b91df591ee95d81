// GET /v1/jobs/{id}/events: a job's events as they happen, resumable by event id.
#include <chrono>
#include <string>

#include "coordinator/gateway/events/event_stream.h"
#include "coordinator/gateway/events/job_follower.h"
#include "coordinator/gateway/routes/api_context.h"
#include "shared/core/short_numbers.h"

namespace ditfleet::gateway {
namespace {

constexpr std::chrono::milliseconds kKeepAlive{15'000}, kProgress{1000}, kLeastProgress{250};

// An event of the type progress without an id: it is not stored, so no client can continue after it. Empty once the job
// has ended.
asio::awaitable<std::string> progress_event(const ApiContext& context, const std::string& id) {
  const auto record = co_await context.service.job(id, "");
  if (!record || job::is_terminal(record->state)) co_return "";
  json::object data{{"job", id},
                    {"type", "progress"},
                    {"unit", nullptr},
                    {"at_ms", unix_ms()},
                    {"state", job::state_name(record->state)},
                    {"progress", context.progress(*record)}};
  co_await context.add_outlook(*record, data);
  co_return format_event("", "progress", json_text(data));
}

asio::awaitable<void> write_events(const ApiContext& context, CallPtr call, std::string id, std::string after,
                                   Sink& sink) {
  const JobLinks links = context.links(*call);
  const bool with_progress = call->request.query_value("progress") == "true";
  Deadline progress_due = Deadline::after({});
  JobFollower follower(context.service, context.hub, id, after);
  sink.when_gone([&follower] { follower.interrupt(); });
  if (!co_await sink.write("retry: 1000\n\n")) co_return;
  while (true) {
    auto batch = co_await follower.next(Deadline::after(with_progress ? kProgress : kKeepAlive));
    std::string text;
    switch (batch.status) {
      case JobFollower::Status::kIdle: text = format_comment("keep-alive"); break;
      case JobFollower::Status::kEvents:
        for (const auto& event : batch.events) {
          const std::string preview = event.type == "preview" ? links.preview(id, event.id) : std::string();
          text += format_event(event.id, event.type, event_json(event, preview));
        }
        break;
      case JobFollower::Status::kStopped:
        co_await sink.write(format_comment("this gateway is stopping; reconnect with the last event id"));
        co_return;
      case JobFollower::Status::kEnd:
      case JobFollower::Status::kGone: co_return;
    }
    if (with_progress && progress_due.passed()) {
      text += co_await progress_event(context, id);
      progress_due = Deadline::after(kLeastProgress);
    }
    if (!co_await sink.write(std::move(text))) co_return;
  }
}

asio::awaitable<Result<Response>> follow_job(const ApiContext& context, CallPtr call) {
  std::string after = "0";
  // A reconnecting browser sends the header; it is newer than the id in the URL.
  std::string known(call->request.header("Last-Event-ID"));
  if (known.empty()) known = call->request.query_value("last_event_id").value_or("");
  if (!known.empty()) {
    auto parsed = parse_event_id(known);
    if (!parsed) co_return parsed.error();
    after = *parsed;
  }
  const auto record = co_await context.find_job(call);
  if (!record) co_return record.error();
  // A job that was submitted twice with one key has two ids; its events are stored under the record's.
  const std::string id = record->id;
  Response response;
  if (job::is_terminal(record->state) && !known.empty()) {
    auto rest = co_await context.service.events(id, after, 1);
    if (rest && rest->empty()) {
      response.status = 204;  // makes a browser's EventSource stop reconnecting
      response.content_type.clear();
      co_return response;
    }
  }
  const auto counted = context.open_stream(*call, response);
  if (!counted) co_return response;
  response.content_type = "text/event-stream";
  response.with("Cache-Control", "no-store").with("X-Accel-Buffering", "no");
  response.filler = format_comment("keep-alive");
  response.stream = [&context, call, id, after, counted](Sink& sink) {
    return write_events(context, call, id, after, sink);
  };
  co_return response;
}

}  // namespace

void add_event_routes(Router& router) { router.add({"GET", "/v1/jobs/{id}/events", follow_job}); }

}  // namespace ditfleet::gateway
