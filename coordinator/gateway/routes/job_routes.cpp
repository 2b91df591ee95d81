// Native jobs: submit, list, read, cancel, results and previews.
#include <algorithm>
#include <functional>

#include "coordinator/gateway/events/event_stream.h"
#include "coordinator/gateway/routes/api_context.h"
#include "coordinator/gateway/routes/errors.h"
#include "coordinator/gateway/routes/openai_images.h"
#include "shared/core/ids.h"
#include "shared/core/wall_clock.h"
#include "shared/job/validate.h"

namespace ditfleet::gateway {
namespace {

constexpr int kDefaultPage = 50, kMaxPage = 200;

Error own_error(const std::string& id, const Error& error) {
  return error.code == Code::kNotFound ? no_such_job(id) : error;
}

Response bytes_response(const Request& request, std::string bytes, std::string media_type, const std::string& etag) {
  Response response;
  response.content_type = std::move(media_type);
  response.with("ETag", etag).with("Cache-Control", "private, max-age=3600, immutable");
  if (names_etag(request.header("If-None-Match"), etag)) {
    response.status = 304;
    return response;
  }
  response.body = std::move(bytes);
  return response;
}

class JobRoutes {
 public:
  explicit JobRoutes(const ApiContext& context) : context_(context), service_(context.service) {}

  asio::awaitable<Response> submit(CallPtr call) {
    if (auto refused = refuse_body_unless_json(call->request)) co_return std::move(*refused);
    auto spec = job::parse_spec(std::string_view(call->request.body));
    if (!spec) co_return error_response(spec.error());
    auto outcome = co_await context_.submit(call, *spec);
    if (!outcome) co_return error_response(outcome.error());
    const JobLinks links = context_.links(*call);
    json::object body;
    if (outcome->existed) {
      auto record = co_await service_.job(outcome->id, call->caller.view());
      if (!record) {
        const bool forgotten = record.error().code == Code::kNotFound;
        co_return error_response(
            forgotten ? unavailable("the job of this Idempotency-Key has just expired; try again to create a new one")
                      : record.error());
      }
      body = job_json(*record, links, true);
    } else {
      const std::string& default_model = context_.dependencies.catalogue.default_model;
      queue::JobRecord record;
      record.id = outcome->id;
      record.tenant = call->caller.tenant;
      record.spec = job::to_json(*spec);
      record.units = spec->n.value_or(1);
      record.traceparent = call->traceparent;
      record.created_ms = unix_ms();
      body = job_json(record, links, false);
      if (!spec->model.empty() || !default_model.empty())
        body["model"] = spec->model.empty() ? default_model : spec->model;
    }
    Response response = json_response(202, json::serialize(body));
    response.with("Location", "/v1/jobs/" + outcome->id);
    if (outcome->existed) response.with("Idempotent-Replayed", "true");
    co_return response;
  }

  asio::awaitable<Response> list(CallPtr call) {
    std::optional<job::State> state;
    int limit = kDefaultPage;
    std::string cursor;
    for (const auto& [name, value] : call->request.query) {
      if (name == "state") {
        state = job::state_from_name(value);
        if (!state) {
          co_return error_response(
              invalid_argument("'" + value +
                                   "' is not a state; it must be one of queued, ready, assigned, running, "
                                   "succeeded, failed, canceled, expired, rejected",
                               "state"));
        }
      } else if (name == "limit") {
        const auto asked = parse_limit(value, kMaxPage);
        if (!asked) co_return error_response(asked.error());
        limit = *asked;
      } else if (name == "cursor") {
        cursor = value;
      } else {
        co_return error_response(
            invalid_argument("unknown parameter '" + name + "'; supported are state, limit and cursor", name));
      }
    }
    auto page = co_await service_.list(call->caller.view(), state, limit, cursor);
    if (!page) co_return error_response(page.error());
    json::array jobs;
    const JobLinks links = context_.links(*call);
    for (const auto& record : page->jobs) jobs.push_back(job_json(record, links, false));
    co_return json_response(
        200, json::serialize(
                 json::object{{"object", "list"}, {"jobs", std::move(jobs)}, {"next_cursor", page->next_cursor}}));
  }

  asio::awaitable<Response> get(CallPtr call) {
    auto record = co_await find(call);
    if (!record) co_return error_response(record.error());
    co_return json_response(
        200, json::serialize(job_json(*record, context_.links(*call), true, context_.dependencies.waits_for)))
        .with("Cache-Control", "no-store");
  }

  asio::awaitable<Response> cancel(CallPtr call) {
    const std::string id = call->param(0);
    if (!is_valid_id(id)) co_return error_response(no_such_job(id));
    auto outcome = co_await service_.cancel(id, call->caller.view());
    if (!outcome) co_return error_response(own_error(id, outcome.error()));
    if (*outcome == queue::CancelOutcome::kAlreadyEnded)
      co_return error_response(Error{Code::kConflict, "job '" + id + "' has already ended", {}});
    auto record = co_await service_.job(id, call->caller.view());
    json::object body{{"id", id}, {"object", "job"}, {"state", "canceled"}};
    if (record) body = job_json(*record, context_.links(*call), true);
    body["cancel_requested"] = true;
    co_return json_response(202, json::serialize(body));
  }

  asio::awaitable<Response> result(CallPtr call) {
    auto record = co_await find(call);
    if (!record) co_return error_response(record.error());
    const std::string& id = call->param(0);
    const auto index = parse_number(call->param(1));
    if (!index || *index < 0 || *index >= record->units) {
      co_return error_response(Error{Code::kNotFound,
                                     "job '" + id + "' has no result '" + call->param(1) + "'; its results are 0 to " +
                                         std::to_string(record->units - 1),
                                     {}});
    }
    const std::string name = "result " + call->param(1) + " of job '" + id + "'";
    const auto unit = std::find_if(record->unit_records.begin(), record->unit_records.end(),
                                   [&](const queue::UnitRecord& u) { return u.unit == *index; });
    const job::State state = unit == record->unit_records.end() ? record->state : unit->state;
    if (state != job::State::kSucceeded || unit == record->unit_records.end()) {
      co_return error_response(Error{Code::kConflict,
                                     name + " is " + std::string(job::state_name(state)) +
                                         (job::is_terminal(state) ? " and has no image" : "; request it again later"),
                                     {}});
    }
    auto manifest = results::Manifest::parse(unit->manifest);
    if (!manifest) co_return error_response(manifest.error());
    const std::string etag = "\"" + manifest->sha256 + "\"";
    std::string bytes;
    if (!names_etag(call->request.header("If-None-Match"), etag)) {
      auto read = co_await service_.result(*manifest);
      if (!read && read.error().code == Code::kNotFound) co_return status_response(410, name + " has expired", "gone");
      if (!read) co_return error_response(read.error());
      bytes = std::move(*read);
    }
    co_return bytes_response(call->request, std::move(bytes), manifest->media_type, etag);
  }

  asio::awaitable<Response> preview(CallPtr call) {
    auto event_id = parse_event_id(call->param(1));
    if (!event_id) co_return error_response(Error{Code::kNotFound, event_id.error().message, {}});
    auto record = co_await find(call);
    if (!record) co_return error_response(record.error());
    const std::string& id = call->param(0);
    const auto event = co_await service_.event(record->id, *event_id);
    if (!event && event.error().code != Code::kNotFound) co_return error_response(own_error(id, event.error()));
    const bool found = event && event->type == "preview";
    const auto key = found ? event->fields.find("key") : std::map<std::string, std::string>::const_iterator();
    if (!found || key == event->fields.end())
      co_return error_response(Error{Code::kNotFound, "preview '" + *event_id + "' does not exist or has expired", {}});
    auto bytes = co_await service_.preview(key->second);
    if (!bytes && bytes.error().code == Code::kNotFound)
      co_return status_response(410, "this preview has expired", "gone");
    if (!bytes) co_return error_response(bytes.error());
    const std::string media_type(sniff_media_type(*bytes));
    co_return bytes_response(call->request, std::move(*bytes), media_type, "\"" + *event_id + "\"");
  }

 private:
  // The job that the path names, as the caller may see it.
  asio::awaitable<Result<queue::JobRecord>> find(CallPtr call) {
    const std::string id = call->param(0);
    if (!is_valid_id(id)) co_return no_such_job(id);
    auto record = co_await service_.job(id, call->caller.view());
    if (!record) co_return own_error(id, record.error());
    co_return std::move(*record);
  }

  const ApiContext& context_;
  JobService& service_;
};

}  // namespace

void add_job_routes(Router& router, const ApiContext& context) {
  const auto routes = std::make_shared<JobRoutes>(context);
  router.add({"POST", "/v1/jobs", std::bind_front(&JobRoutes::submit, routes)});
  router.add({"GET", "/v1/jobs", std::bind_front(&JobRoutes::list, routes)});
  router.add({"GET", "/v1/jobs/{id}", std::bind_front(&JobRoutes::get, routes)});
  router.add({"DELETE", "/v1/jobs/{id}", std::bind_front(&JobRoutes::cancel, routes)});
  router.add({"GET", "/v1/jobs/{id}/results/{index}", std::bind_front(&JobRoutes::result, routes), Access::kKeyOrLink});
  router.add(
      {"GET", "/v1/jobs/{id}/previews/{event}", std::bind_front(&JobRoutes::preview, routes), Access::kKeyOrLink});
}

}  // namespace ditfleet::gateway
