// GET /v1/jobs/{id}/events and GET /v1/events: the events of a job and of all jobs as they happen, resumable by event
// id.
#include <chrono>
#include <map>
#include <string>

#include "coordinator/gateway/events/event_stream.h"
#include "coordinator/gateway/events/job_follower.h"
#include "coordinator/gateway/routes/api_context.h"
#include "shared/core/short_numbers.h"
#include "shared/core/text.h"
#include "shared/queue/keys.h"
#include "shared/queue/records.h"
#include "shared/redis/connection.h"

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
          text += format_event(event.id, shown_type(event), event_json(event, preview));
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

// The id after which the client continues; empty: from the beginning, or from now on. A reconnecting browser sends the
// header; it is newer than the id in the URL.
std::string known_event(const Call& call) {
  std::string known(call.request.header("Last-Event-ID"));
  return known.empty() ? call.request.query_value("last_event_id").value_or("") : known;
}

void make_event_stream(Response& response) {
  response.content_type = "text/event-stream";
  response.with("Cache-Control", "no-store").with("X-Accel-Buffering", "no");
  response.filler = format_comment("keep-alive");
}

asio::awaitable<Result<Response>> follow_job(const ApiContext& context, CallPtr call) {
  std::string after = "0";
  const std::string known = known_event(*call);
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
  make_event_stream(response);
  response.stream = [&context, call, id, after, counted](Sink& sink) {
    return write_events(context, call, id, after, sink);
  };
  co_return response;
}

// The events of all jobs that the caller may see.
class TenantStream {
 public:
  TenantStream(const ApiContext& context, CallPtr call)
      : context_(context),
        call_(std::move(call)),
        keys_(context.dependencies.queue->options().shard),
        with_steps_(call_->request.query_value("steps") == "true") {}

  // The id of the newest entry, where a new stream begins. Errors: those of Connection::execute().
  asio::awaitable<Result<std::string>> newest() {
    const auto last = co_await read("XREVRANGE", "+", "-", 1);
    if (!last) co_return last.error();
    co_return last->elements.empty() ? "0-0" : last->elements[0].elements.at(0).text;
  }

  // Whether entries after `after` were removed before they were read.
  asio::awaitable<bool> has_gap(std::string after) {
    if (after == "0-0") co_return false;
    const auto known = co_await read("XRANGE", after, after, 1), first = co_await read("XRANGE", "-", "+", 1);
    if (!known || !first || !known->elements.empty() || first->elements.empty()) co_return false;
    co_return leading_integer(first->elements[0].elements.at(0).text) > leading_integer(after);
  }

  // The events after the entry `after`, as text, and moves it. Empty: there are none yet. An entry's last event has its
  // id, so that a client which lost its connection within an entry gets all of it again.
  asio::awaitable<Result<std::string>> next(std::string& after) {
    const auto entries = co_await read("XRANGE", "(" + after, "+", kEntries);
    if (!entries) co_return entries.error();
    std::string out;
    for (const redis::Reply& entry : entries->elements) {
      const std::string id = entry.elements.at(0).text;
      std::vector<queue::Event> events;
      for (const std::string_view line : split(entry.elements.at(1).elements.at(1).text, '\n'))
        if (auto event = queue::parse_feed_line(id, line)) queue::append_events(std::move(*event), events);
      std::vector<queue::Event> seen;
      for (queue::Event& event : events)
        if (wants(event) && co_await is_visible(event)) seen.push_back(std::move(event));
      for (const queue::Event& event : seen) {
        const bool last = &event == &seen.back();
        const std::string preview =
            event.type == "preview" ? context_.links(*call_).preview(event.job, event.id) : std::string();
        out += format_event(last ? id : "", shown_type(event), event_json(event, preview));
      }
      after = id;
    }
    co_return out;
  }

 private:
  static constexpr int kEntries = 200;
  static constexpr std::size_t kKnownJobs = 10'000;

  asio::awaitable<Result<redis::Reply>> read(const char* command, std::string from, std::string to, int count) {
    return context_.dependencies.redis->execute(
        redis::Command(command) << keys_.events() << from << to << "COUNT" << count, Deadline::after(kPatience));
  }
  bool wants(const queue::Event& event) const {
    return with_steps_ || (event.type != "step" && event.type != "preview");
  }
  asio::awaitable<bool> is_visible(const queue::Event& event) {
    if (call_->caller.sees_all) co_return true;
    if (const auto tenant = event.fields.find("tenant"); tenant != event.fields.end())
      visible_[event.job] = tenant->second == call_->caller.tenant;
    const auto known = visible_.find(event.job);
    if (known != visible_.end()) co_return known->second;
    const auto record = co_await context_.service.job(event.job, call_->caller.view());
    if (visible_.size() >= kKnownJobs) visible_.clear();
    co_return visible_[event.job] = record.ok();
  }

  static constexpr std::chrono::seconds kPatience{5};
  const ApiContext& context_;
  CallPtr call_;
  queue::Keys keys_;
  bool with_steps_;
  std::map<std::string, bool> visible_;
};

asio::awaitable<void> write_tenant_events(const ApiContext& context, CallPtr call, std::string after, Sink& sink) {
  TenantStream stream(context, call);
  const auto subscription = context.hub->subscribe("");
  sink.when_gone([&subscription] { subscription->interrupt(); });
  if (!co_await sink.write("retry: 1000\n\n")) co_return;
  if (co_await stream.has_gap(after) && !co_await sink.write(format_event("", "gap", "{}"))) co_return;
  while (!subscription->interrupted()) {
    const std::string before = after;
    auto text = co_await stream.next(after);
    if (text && !text->empty()) {
      if (!co_await sink.write(std::move(*text))) co_return;
    }
    if (after != before) continue;
    const auto wake = co_await subscription->wait(Deadline::after(text ? kKeepAlive : kProgress));
    if (wake == EventHub::Wake::kStopped) {
      co_await sink.write(format_comment("this gateway is stopping; reconnect with the last event id"));
      co_return;
    }
    if (wake == EventHub::Wake::kTimeout && text && !co_await sink.write(format_comment("keep-alive"))) co_return;
  }
}

asio::awaitable<Result<Response>> follow_tenant(const ApiContext& context, CallPtr call) {
  const std::string after = known_event(*call);
  Result<std::string> position = parse_event_id(after.empty() ? "0" : after);
  if (after.empty()) position = co_await TenantStream(context, call).newest();
  if (!position) co_return position.error();
  Response response;
  const auto counted = context.open_stream(*call, response);
  if (!counted) co_return response;
  make_event_stream(response);
  response.stream = [&context, call, after = *position, counted](Sink& sink) {
    return write_tenant_events(context, call, after, sink);
  };
  co_return response;
}

}  // namespace

void add_event_routes(Router& router) {
  router.add({"GET", "/v1/jobs/{id}/events", follow_job});
  router.add({"GET", "/v1/events", follow_tenant});
}

}  // namespace ditfleet::gateway
