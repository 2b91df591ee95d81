// GET /v1/jobs/{id}/events: a job's events as they happen, resumable by event id.
#include <chrono>
#include <functional>
#include <string>

#include "coordinator/gateway/events/event_stream.h"
#include "coordinator/gateway/events/job_follower.h"
#include "coordinator/gateway/routes/api_context.h"
#include "coordinator/gateway/routes/errors.h"
#include "shared/core/ids.h"

namespace ditfleet::gateway {
namespace {

constexpr std::chrono::seconds kKeepAlive{15};

class EventRoutes {
 public:
  explicit EventRoutes(const ApiContext& context) : context_(context), service_(context.service) {}

  asio::awaitable<Response> follow(CallPtr call) {
    const std::string id = call->param(0);
    std::string after = "0";
    // A reconnecting browser sends the header; it is newer than the id in the URL.
    std::string known(call->request.header("Last-Event-ID"));
    if (known.empty()) known = call->request.query_value("last_event_id").value_or("");
    if (!known.empty()) {
      auto parsed = parse_event_id(known);
      if (!parsed) co_return error_response(parsed.error());
      after = *parsed;
    }
    Result<queue::JobRecord> record = no_such_job(id);
    if (is_valid_id(id)) record = co_await service_.job(id, call->caller.view());
    if (!record) co_return error_response(record.error().code == Code::kNotFound ? no_such_job(id) : record.error());
    // A job that was submitted twice with one key has two ids; its events are stored under the record's.
    const std::string own_id = record->id;
    if (job::is_terminal(record->state) && !known.empty()) {
      auto rest = co_await service_.events(own_id, after, 1);
      if (rest && rest->empty()) {
        // 204 makes a browser's EventSource stop reconnecting.
        Response nothing;
        nothing.status = 204;
        nothing.content_type.clear();
        co_return nothing;
      }
    }
    Response response;
    auto counted = context_.open_stream(*call, response);
    if (!counted) co_return response;
    response.content_type = "text/event-stream";
    response.with("Cache-Control", "no-store").with("X-Accel-Buffering", "no");
    response.filler = format_comment("keep-alive");
    response.stream = [this, call, own_id, after, counted = std::move(counted)](Sink& sink) mutable {
      return write_events(call, own_id, after, std::move(counted), sink);
    };
    co_return response;
  }

 private:
  asio::awaitable<void> write_events(CallPtr call, std::string id, std::string after,
                                     [[maybe_unused]] std::shared_ptr<void> counted, Sink& sink) {
    const JobLinks links = context_.links(*call);
    JobFollower follower(service_, context_.hub, id, after);
    sink.when_gone([&follower] { follower.interrupt(); });
    if (!co_await sink.write("retry: 1000\n\n")) co_return;
    while (true) {
      auto batch = co_await follower.next(Deadline::after(kKeepAlive));
      switch (batch.status) {
        case JobFollower::Status::kIdle:
          if (!co_await sink.write(format_comment("keep-alive"))) co_return;
          break;
        case JobFollower::Status::kEvents: {
          std::string text;
          for (const auto& event : batch.events) {
            const std::string preview = event.type == "preview" ? links.preview(id, event.id) : std::string();
            text += format_event(event.id, event.type, event_json(event, preview));
          }
          if (!co_await sink.write(std::move(text))) co_return;
          break;
        }
        case JobFollower::Status::kStopped:
          co_await sink.write(format_comment("this gateway is stopping; reconnect with the last event id"));
          co_return;
        case JobFollower::Status::kEnd:
        case JobFollower::Status::kGone: co_return;
      }
    }
  }

  const ApiContext& context_;
  JobService& service_;
};

}  // namespace

void add_event_routes(Router& router, const ApiContext& context) {
  const auto routes = std::make_shared<EventRoutes>(context);
  router.add({"GET", "/v1/jobs/{id}/events", std::bind_front(&EventRoutes::follow, routes)});
}

}  // namespace ditfleet::gateway
