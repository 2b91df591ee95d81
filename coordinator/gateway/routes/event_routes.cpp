// GET /v1/jobs/{id}/events: a job's events as they happen, resumable by event id.
#include <algorithm>
#include <chrono>
#include <functional>
#include <string>

#include "coordinator/gateway/events/event_stream.h"
#include "coordinator/gateway/events/job_follower.h"
#include "coordinator/gateway/http/http_metrics.h"
#include "coordinator/gateway/routes/api_context.h"
#include "coordinator/gateway/routes/errors.h"
#include "shared/core/ids.h"

namespace ditfleet::gateway {
namespace {

constexpr std::chrono::seconds kKeepAlive{15};

// Counts a stream while it is open.
struct OpenStream {
  explicit OpenStream(int& open) : open_(open) { ++open_, count_event_streams(1); }
  ~OpenStream() { --open_, count_event_streams(-1); }
  OpenStream(const OpenStream&) = delete;
  OpenStream& operator=(const OpenStream&) = delete;
  int& open_;
};

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
    // Streams stay open for long, so a quarter of the connections is reserved for other requests.
    if (const int most = std::max(1, context_.dependencies.settings.gateway.max_connections / 4 * 3);
        open_streams_ >= most) {
      co_return status_response(503,
                                std::to_string(open_streams_) +
                                    " event streams are open, which is the limit (three quarters of "
                                    "gateway.max_connections); poll the job or try again shortly",
                                "too_many_streams")
          .with("Retry-After", "5");
    }
    Response response;
    response.content_type = "text/event-stream";
    response.with("Cache-Control", "no-store").with("X-Accel-Buffering", "no");
    response.filler = format_comment("keep-alive");
    response.stream = [this, call, own_id, after](Sink& sink) { return write_events(call, own_id, after, sink); };
    co_return response;
  }

 private:
  asio::awaitable<void> write_events(CallPtr call, std::string id, std::string after, Sink& sink) {
    const OpenStream counted(open_streams_);
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
  int open_streams_ = 0;
};

}  // namespace

void add_event_routes(Router& router, const ApiContext& context) {
  const auto routes = std::make_shared<EventRoutes>(context);
  router.add({"GET", "/v1/jobs/{id}/events", std::bind_front(&EventRoutes::follow, routes)});
}

}  // namespace ditfleet::gateway
