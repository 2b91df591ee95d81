// Native jobs: submit, list, read, cancel, results and previews.
#include <spdlog/spdlog.h>

#include <algorithm>

#include "coordinator/gateway/events/event_stream.h"
#include "coordinator/gateway/routes/api_context.h"
#include "coordinator/gateway/routes/errors.h"
#include "coordinator/gateway/routes/openai_images.h"
#include "shared/core/ids.h"
#include "shared/core/text.h"
#include "shared/core/wall_clock.h"
#include "shared/job/spec_json.h"
#include "shared/job/validate.h"

namespace ditfleet::gateway {

// Not in the unnamed namespace, because coroutines of a header hold it.
struct ParsedJob {
  job::JobSpec spec;
  SentImages images;
};

namespace {

constexpr int kDefaultPage = 50, kMaxPage = 200;
constexpr std::int64_t kMostBuffered = 1 << 20;  // larger results are streamed

Result<ParsedJob> parse_job(std::string_view body) {
  auto parsed = parse_json(body);
  if (!parsed) return parsed.error();
  ParsedJob job;
  if (parsed->is_object()) job.images = take_images(parsed->get_object());
  auto spec = job::parse_spec(*parsed);
  if (!spec) return spec.error();
  job.spec = std::move(*spec);
  return job;
}

// The answer to a job's submission.
asio::awaitable<Result<Response>> accepted(const ApiContext& context, CallPtr call, queue::SubmitOutcome outcome,
                                           const job::JobSpec& spec, std::string tenant) {
  json::object body;
  if (outcome.existed) {
    auto record = co_await context.service.job(outcome.id, call->caller.view());
    if (!record && record.error().code == Code::kNotFound)
      co_return unavailable("the job of this Idempotency-Key has just expired; try again to create a new one");
    if (!record) co_return record.error();
    body = co_await context.describe(*record, call, true);
  } else {
    const std::string& default_model = context.dependencies.catalogue.default_model;
    queue::JobRecord record;
    record.id = outcome.id;
    record.tenant = tenant;
    record.spec = job::to_json(spec);
    record.units = spec.n.value_or(1);
    record.traceparent = call->traceparent;
    record.created_ms = unix_ms();
    body = co_await context.describe(record, call, false);
    if (!spec.model.empty() || !default_model.empty()) body["model"] = spec.model.empty() ? default_model : spec.model;
  }
  Response response = json_response(202, body);
  response.with("Location", "/v1/jobs/" + outcome.id);
  if (outcome.existed) response.with("Idempotent-Replayed", "true");
  co_return response;
}

asio::awaitable<Result<Response>> submit_job(const ApiContext& context, CallPtr call) {
  if (auto refused = refuse_body_unless_json(call->request)) co_return std::move(*refused);
  auto received = co_await context.receive_images(call);
  if (!received) co_return unread_body(received.error());
  const std::size_t bytes = received->bytes.size();
  std::function<Result<ParsedJob>()> work = [text = std::move(received->bytes)] { return parse_job(text); };
  auto parsed = co_await context.off_loop<ParsedJob>(call, bytes, std::move(work));
  if (!parsed) co_return parsed.error();
  job::JobSpec& spec = parsed->spec;
  auto outcome = co_await context.submit(call, spec, std::move(parsed->images));
  if (!outcome) co_return outcome.error();
  co_return co_await accepted(context, call, std::move(*outcome), spec, call->caller.tenant);
}

// A new job like one that has ended, of the same tenant.
asio::awaitable<Result<Response>> retry_job(const ApiContext& context, CallPtr call) {
  auto record = co_await context.find_job(call);
  if (!record) co_return record.error();
  if (!job::is_terminal(record->state))
    co_return Error{Code::kConflict, "job '" + record->id + "' has not ended; cancel it first, or wait"};
  auto spec = job::parse_spec(std::string_view(record->spec));
  if (!spec) co_return spec.error();
  auto outcome = co_await context.submit(call, *spec, {}, false, record->tenant);
  if (!outcome) co_return outcome.error();
  if (record->tenant != call->caller.tenant)
    spdlog::info("audit: {} retried job {} of tenant '{}' as {}, request {}",
                 call->caller.key.empty() ? "nobody's key" : "key " + call->caller.key, record->id, record->tenant,
                 outcome->id, call->request_id);
  co_return co_await accepted(context, call, std::move(*outcome), *spec, record->tenant);
}

asio::awaitable<Result<Response>> list_jobs(const ApiContext& context, CallPtr call) {
  std::optional<job::State> state;
  int limit = kDefaultPage;
  std::string cursor;
  for (const auto& [name, value] : call->request.query) {
    if (name == "state") {
      state = job::state_from_name(value);
      if (!state) {
        co_return invalid_argument("'" + value +
                                       "' is not a state; it must be one of queued, paused, ready, assigned, "
                                       "running, canceling, succeeded, failed, canceled, expired, rejected",
                                   "state");
      }
    } else if (name == "limit") {
      const auto asked = parse_limit(value, kMaxPage);
      if (!asked) co_return asked.error();
      limit = *asked;
    } else if (name == "cursor") {
      cursor = value;
    } else {
      co_return invalid_argument("unknown parameter '" + name + "'; supported are state, limit and cursor", name);
    }
  }
  auto page = co_await context.service.list(call->caller.view(), state, limit, cursor, false, {});
  if (!page) co_return page.error();
  std::size_t bytes = 0;
  std::vector<json::object> outlooks(page->jobs.size());
  for (std::size_t i = 0; i < page->jobs.size(); ++i) {
    bytes += page->jobs[i].spec.size();
    co_await context.add_outlook(page->jobs[i], outlooks[i]);
  }
  JobLinks links = context.links(*call);
  // They are no constants, and lists have no links to results.
  links.signer = nullptr;
  links.stored = {};
  std::function<Result<Response>()> work = [page = std::move(*page), outlooks = std::move(outlooks), links] {
    json::array jobs;
    for (std::size_t i = 0; i < outlooks.size(); ++i) {
      json::object job = job_json(page.jobs[i], links, false);
      for (const auto& [name, value] : outlooks[i]) job[name] = value;
      jobs.push_back(std::move(job));
    }
    return json_response(200, {{"object", "list"}, {"jobs", std::move(jobs)}, {"next_cursor", page.next_cursor}});
  };
  co_return co_await context.off_loop<Response>(call, bytes, std::move(work));
}

asio::awaitable<Result<Response>> get_job(const ApiContext& context, CallPtr call) {
  auto record = co_await context.find_job(call);
  if (!record) co_return record.error();
  co_return json_response(200, co_await context.describe(*record, call, true)).with("Cache-Control", "no-store");
}

asio::awaitable<Result<Response>> cancel_job(const ApiContext& context, CallPtr call) {
  const std::string id = call->param(0);
  if (!is_valid_id(id)) co_return no_such_job(id);
  auto outcome = co_await context.service.cancel(id, call->caller.view());
  if (!outcome) co_return outcome.error().code == Code::kNotFound ? no_such_job(id) : outcome.error();
  if (*outcome == queue::CancelOutcome::kAlreadyEnded)
    co_return Error{Code::kConflict, "job '" + id + "' has already ended", {}};
  auto record = co_await context.service.job(id, call->caller.view());
  json::object body{{"id", id}, {"object", "job"}, {"state", "canceled"}};
  if (record) body = co_await context.describe(*record, call, true);
  body["cancel_requested"] = true;
  co_return json_response(202, body);
}

asio::awaitable<Result<Response>> pause_or_resume(const ApiContext& context, CallPtr call, bool pauses) {
  const std::string id = call->param(0), view = call->caller.view();
  if (!is_valid_id(id)) co_return no_such_job(id);
  // Outside the co_await, because GCC 12 evaluates both branches of a conditional inside one.
  auto changing = pauses ? context.service.pause(id, view) : context.service.resume(id, view);
  auto outcome = co_await std::move(changing);
  if (!outcome) co_return outcome.error().code == Code::kNotFound ? no_such_job(id) : outcome.error();
  if (*outcome != queue::PauseOutcome::kDone)
    co_return Error{
        Code::kConflict,
        "job '" + id + "' " + (*outcome == queue::PauseOutcome::kCanceling ? "is being canceled" : "has already ended"),
        {}};
  auto record = co_await context.service.job(id, view);
  if (!record) co_return record.error();
  co_return json_response(202, co_await context.describe(*record, call, true));
}

asio::awaitable<Result<Response>> pause_job(const ApiContext& context, CallPtr call) {
  return pause_or_resume(context, call, true);
}

asio::awaitable<Result<Response>> resume_job(const ApiContext& context, CallPtr call) {
  return pause_or_resume(context, call, false);
}

asio::awaitable<Result<Response>> get_result(const ApiContext& context, CallPtr call) {
  auto record = co_await context.find_job(call);
  if (!record) co_return record.error();
  const auto index = number_of(call->param(1), 0, record->units - 1);
  if (!index) {
    co_return Error{Code::kNotFound,
                    "job '" + record->id + "' has no result '" + call->param(1) + "'; its results are 0 to " +
                        std::to_string(record->units - 1),
                    {}};
  }
  co_return co_await send_result(context, call, std::move(*record), *index);
}

asio::awaitable<Result<Response>> get_preview(const ApiContext& context, CallPtr call) {
  auto event_id = parse_event_id(call->param(1));
  if (!event_id) co_return Error{Code::kNotFound, event_id.error().message, {}};
  auto record = co_await context.find_job(call);
  if (!record) co_return record.error();
  const auto event = co_await context.service.event(record->id, *event_id);
  if (!event && event.error().code != Code::kNotFound) co_return event.error();
  const bool found = event && event->type == "preview" && event->fields.contains("key");
  if (!found) co_return Error{Code::kNotFound, "preview '" + *event_id + "' does not exist or has expired", {}};
  auto bytes = co_await context.service.preview(event->fields.at("key"));
  if (!bytes && bytes.error().code == Code::kNotFound)
    co_return status_response(410, "this preview has expired", "gone");
  if (!bytes) co_return bytes.error();
  const std::string media_type(sniff_media_type(*bytes));
  co_return bytes_response(call->request, std::move(*bytes), media_type, "\"" + *event_id + "\"");
}

}  // namespace

asio::awaitable<Result<Response>> send_result(const ApiContext& context, CallPtr call, queue::JobRecord record,
                                              int index) {
  const std::string name = "result " + std::to_string(index) + " of job '" + record.id + "'";
  const queue::UnitRecord* unit = find_unit(record, index);
  const job::State state = unit ? unit->state : record.state;
  if (state != job::State::kSucceeded || !unit) {
    co_return Error{Code::kConflict,
                    name + " is " + std::string(job::state_name(state)) +
                        (job::is_terminal(state) ? " and has no result" : "; request it again later"),
                    {}};
  }
  auto manifest = results::Manifest::parse(unit->manifest);
  if (!manifest) co_return manifest.error();
  const std::string etag = "\"" + manifest->sha256 + "\"";
  const Request& request = call->request;
  Response response = bytes_response(request, {}, manifest->media_type, etag);
  if (response.status == 304) co_return response;
  response.with("Accept-Ranges", "bytes");
  ByteRange part{0, manifest->bytes};
  const bool asks_for_part = request.method == "GET" && request.count_headers("Range") == 1 &&
                             (!request.has_header("If-Range") || request.header("If-Range") == etag);
  if (const auto asked = asks_for_part ? parse_range(request.header("Range"), manifest->bytes) : std::nullopt) {
    const std::string bytes = std::to_string(manifest->bytes);
    if (asked->size == 0) {
      co_return status_response(416, name + " has " + bytes + " bytes, none of them in the range",
                                "range_not_satisfiable", "Range")
          .with("Content-Range", "bytes */" + bytes);
    }
    part = *asked;
    response.status = 206;
    response.with("Content-Range", "bytes " + std::to_string(part.first) + "-" +
                                       std::to_string(part.first + part.size - 1) + "/" + bytes);
  }
  // A streamed body ends the connection, so small ones are sent whole.
  const bool streamed = request.method == "HEAD" || part.size > kMostBuffered;
  const bool verified = !streamed && part.size == manifest->bytes;
  // Outside the co_await, because GCC 12 evaluates both branches of a conditional inside one.
  auto reading = verified ? context.service.result(*manifest)
                          : context.service.result_piece(*manifest, part.first, streamed ? 1 : part.size);
  auto read = co_await std::move(reading);
  if (!read && read.error().code == Code::kNotFound) co_return status_response(410, name + " has expired", "gone");
  if (!read) co_return read.error();
  if (!streamed) {
    response.body = std::move(*read);
    co_return response;
  }
  Response refused;
  const auto counted = request.method == "HEAD" ? nullptr : context.open_stream(*call, refused);
  if (!counted && request.method != "HEAD") co_return refused;
  response.stream_bytes = static_cast<std::uint64_t>(part.size);
  response.stream = [&context, manifest = *manifest, part, counted](Sink& sink) -> asio::awaitable<void> {
    co_await write_result(context.service, manifest, part, false, sink);
  };
  co_return response;
}

void add_job_routes(Router& router) {
  router.add({.method = "POST", .pattern = "/v1/jobs", .handler = submit_job, .takes_images = true});
  router.add({"GET", "/v1/jobs", list_jobs});
  router.add({"GET", "/v1/jobs/{id}", get_job});
  router.add({"DELETE", "/v1/jobs/{id}", cancel_job});
  router.add({"POST", "/v1/jobs/{id}/retry", retry_job});
  router.add({"POST", "/v1/jobs/{id}/pause", pause_job});
  router.add({"POST", "/v1/jobs/{id}/resume", resume_job});
  router.add({"GET", "/v1/jobs/{id}/results/{index}", get_result, Access::kKeyOrLink});
  router.add({"GET", "/v1/jobs/{id}/previews/{event}", get_preview, Access::kKeyOrLink});
}

}  // namespace ditfleet::gateway
