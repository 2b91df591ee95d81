// Native jobs: submit, list, read, cancel, results, previews; and the workers.
#include <algorithm>
#include <set>

#include "coordinator/gateway/events/event_stream.h"
#include "coordinator/gateway/http/query_number.h"
#include "coordinator/gateway/routes/api.h"
#include "coordinator/gateway/routes/error_body.h"
#include "shared/core/ids.h"
#include "shared/core/wall_clock.h"
#include "shared/job/validate.h"

namespace ditfleet::gateway {
namespace {

constexpr int kListDefault = 50, kListMost = 200;
constexpr std::size_t kIdempotencyKeyMost = 255;

// An id that no job can have need not go to Redis.
Result<std::string> job_id(const std::string& text) {
  if (!is_valid_id(text)) return no_such_job(text);
  return text;
}

Error told(const std::string& id, const Error& error) {
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

}  // namespace

asio::awaitable<Result<queue::SubmitOutcome>> Api::submit(CallPtr call, job::JobSpec spec, Response* refusal) {
  const std::string_view key = call->request.header("Idempotency-Key");
  if (call->request.has_header("Idempotency-Key") &&
      (key.empty() || key.size() > kIdempotencyKeyMost ||
       std::any_of(key.begin(), key.end(), [](char c) { return c < 0x21 || c > 0x7e; }))) {
    co_return invalid_argument("the Idempotency-Key header must be 1 to 255 visible ASCII characters, such as a UUID");
  }
  if (!spec.loras.empty()) {
    auto fresh = co_await refresh_loras();
    if (!fresh) co_return fresh.error();
  }
  auto complete =
      job::complete_spec(spec, options_.catalogue, [&](const job::LoraUse& use, const job::ModelEntry& model) {
        return resolve_lora(call->caller.tenant, use, model);
      });
  if (!complete) co_return complete.error();
  if (options_.advise) {
    const Advice advice = options_.advise(*complete, call->caller.tenant);
    if (!advice.accept) {
      const Error error{Code::kResourceExhausted, advice.reason, advice.param};
      *refusal = error_response(error);
      for (auto& [name, value] : refusal->headers) {
        if (name == "Retry-After") value = std::to_string(std::max(1, advice.retry_after_s));
      }
      co_return error;
    }
  }
  queue::Submission submission;
  submission.tenant = call->caller.tenant;
  // As the client wrote it, not completed: a retry under the same key must be the same body, and a seed
  // that was left out is drawn only once, on admission. There adapters get their digests, too.
  submission.spec = job::to_json(spec);
  if (submission.spec.size() > job::kMaxSpecBytes) {
    co_return Error{Code::kPayloadTooLarge,
                    "the job has " + std::to_string(submission.spec.size()) + " bytes in its canonical form; at most " +
                        std::to_string(job::kMaxSpecBytes) + " are allowed",
                    {}};
  }
  submission.idempotency_key = std::string(key);
  submission.traceparent = call->traceparent;
  submission.deadline_in_ms = spec.deadline_ms.value_or(0);
  co_return co_await service_.submit(submission);
}

asio::awaitable<Response> Api::submit_job(CallPtr call) {
  if (auto refused = refuse_body(call->request)) co_return std::move(*refused);
  auto spec = job::parse_spec(std::string_view(call->request.body));
  if (!spec) co_return error_response(spec.error());
  const int units = spec->n.value_or(1);
  Response refusal;
  auto outcome = co_await submit(call, *spec, &refusal);
  if (!outcome) {
    if (refusal.status != 200) co_return refusal;
    co_return error_response(outcome.error());
  }
  const JobLinks job_links = links(*call);
  json::object body;
  if (outcome->existed) {
    auto record = co_await service_.job(outcome->id, call->caller.view());
    if (!record) {  // what state it is in is not known: none is made up
      const bool forgotten = record.error().code == Code::kNotFound;
      co_return error_response(
          forgotten ? unavailable("the job of this Idempotency-Key is being forgotten; try again for a new one")
                    : record.error());
    }
    body = job_json(*record, job_links, true);
  } else {
    queue::JobRecord record;
    record.id = outcome->id;
    record.tenant = call->caller.tenant;
    record.spec = job::to_json(*spec);
    record.units = units;
    record.traceparent = call->traceparent;
    record.created_ms = unix_ms();
    body = job_json(record, job_links, false);
    if (!spec->model.empty() || !options_.catalogue.default_model.empty()) {
      body["model"] = spec->model.empty() ? options_.catalogue.default_model : spec->model;
    }
  }
  Response response = json_response(202, json::serialize(body));
  response.with("Location", "/v1/jobs/" + outcome->id);
  if (outcome->existed) response.with("Idempotent-Replayed", "true");
  co_return response;
}

asio::awaitable<Response> Api::list_jobs(CallPtr call) {
  std::optional<job::State> state;
  int limit = kListDefault;
  std::string cursor;
  for (const auto& [name, value] : call->request.query) {
    if (name == "state") {
      state = job::state_from_name(value);
      if (!state) {
        co_return error_response(
            invalid_argument("'" + value +
                                 "' is not a state; it is one of queued, ready, assigned, running, "
                                 "succeeded, failed, canceled, expired, rejected",
                             "state"));
      }
    } else if (name == "limit") {
      const auto asked = parse_limit(value, kListMost);
      if (!asked) co_return error_response(asked.error());
      limit = *asked;
    } else if (name == "cursor") {
      cursor = value;
    } else {
      co_return error_response(
          invalid_argument("'" + name + "' is not a parameter of this list; it takes state, limit and cursor", name));
    }
  }
  auto page = co_await service_.list(call->caller.view(), state, limit, cursor);
  if (!page) co_return error_response(page.error());
  json::array jobs;
  const JobLinks job_links = links(*call);
  for (const auto& record : page->jobs) jobs.push_back(job_json(record, job_links, false));
  co_return json_response(200, json::serialize(json::object{
                                   {"object", "list"}, {"jobs", std::move(jobs)}, {"next_cursor", page->next_cursor}}));
}

asio::awaitable<Response> Api::get_job(CallPtr call) {
  auto id = job_id(call->match.params[0]);
  if (!id) co_return error_response(id.error());
  auto record = co_await service_.job(*id, call->caller.view());
  if (!record) co_return error_response(told(*id, record.error()));
  co_return json_response(200, json::serialize(job_json(*record, links(*call), true, options_.waits_for)))
      .with("Cache-Control", "no-store");
}

asio::awaitable<Response> Api::cancel_job(CallPtr call) {
  auto id = job_id(call->match.params[0]);
  if (!id) co_return error_response(id.error());
  auto outcome = co_await service_.cancel(*id, call->caller.view());
  if (!outcome) co_return error_response(told(*id, outcome.error()));
  if (*outcome == queue::CancelOutcome::kAlreadyEnded) {
    co_return error_response(
        Error{Code::kConflict, "job '" + *id + "' has already ended; there is nothing left to cancel", {}});
  }
  auto record = co_await service_.job(*id, call->caller.view());
  json::object body{{"id", *id}, {"object", "job"}, {"state", "canceled"}};
  if (record) body = job_json(*record, links(*call), true);
  body["cancel_requested"] = true;
  co_return json_response(202, json::serialize(body));
}

asio::awaitable<Response> Api::get_result(CallPtr call) {
  auto id = job_id(call->match.params[0]);
  if (!id) co_return error_response(id.error());
  auto record = co_await service_.job(*id, call->caller.view());
  if (!record) co_return error_response(told(*id, record.error()));
  const auto index = parse_number(call->match.params[1]);
  if (!index || *index < 0 || *index >= record->units) {
    co_return error_response(Error{Code::kNotFound,
                                   "job '" + *id + "' has no result '" + call->match.params[1] +
                                       "'; its results are 0 to " + std::to_string(record->units - 1),
                                   {}});
  }
  const auto unit = std::find_if(record->unit_records.begin(), record->unit_records.end(),
                                 [&](const queue::UnitRecord& u) { return u.unit == *index; });
  const job::State state = unit == record->unit_records.end() ? record->state : unit->state;
  if (state != job::State::kSucceeded || unit == record->unit_records.end()) {
    const std::string now =
        "result " + call->match.params[1] + " of job '" + *id + "' is " + std::string(job::state_name(state));
    co_return error_response(
        Error{Code::kConflict,
              now + (job::is_terminal(state) ? "; it has no picture" : "; ask again when it has succeeded"),
              {}});
  }
  auto manifest = results::Manifest::parse(unit->manifest);
  if (!manifest) co_return error_response(manifest.error());
  const std::string etag = "\"" + manifest->sha256 + "\"";
  std::string bytes;
  if (!names_etag(call->request.header("If-None-Match"), etag)) {
    auto read = co_await service_.result(*manifest);
    if (!read && read.error().code == Code::kNotFound) {
      co_return status_response(410, "result " + call->match.params[1] + " of job '" + *id + "' is no longer kept",
                                "gone");
    }
    if (!read) co_return error_response(read.error());
    bytes = std::move(*read);
  }
  co_return bytes_response(call->request, std::move(bytes), manifest->media_type, etag);
}

asio::awaitable<Response> Api::get_preview(CallPtr call) {
  auto id = job_id(call->match.params[0]);
  if (!id) co_return error_response(id.error());
  auto event_id = parse_event_id(call->match.params[1]);
  if (!event_id) co_return error_response(Error{Code::kNotFound, event_id.error().message, {}});
  auto record = co_await service_.job(*id, call->caller.view());
  if (!record) co_return error_response(told(*id, record.error()));
  auto events = co_await service_.events(record->id, id_before(*event_id), 1);
  if (!events) co_return error_response(told(*id, events.error()));
  const bool found = !events->empty() && events->front().id == *event_id && events->front().type == "preview";
  const auto key = found ? events->front().fields.find("key") : std::map<std::string, std::string>::const_iterator();
  if (!found || key == events->front().fields.end()) {
    co_return error_response(Error{Code::kNotFound, "job '" + *id + "' has no preview event '" + *event_id + "'", {}});
  }
  auto bytes = co_await service_.preview(key->second);
  if (!bytes && bytes.error().code == Code::kNotFound) {
    co_return status_response(410, "this preview is no longer kept", "gone");
  }
  if (!bytes) co_return error_response(bytes.error());
  const std::string media_type(sniff_media_type(*bytes));
  co_return bytes_response(call->request, std::move(*bytes), media_type, "\"" + *event_id + "\"");
}

asio::awaitable<Response> Api::list_workers(CallPtr call) {
  auto workers = co_await service_.workers();
  if (!workers) co_return error_response(workers.error());
  // A worker serves every tenant; each sees only its own jobs and adapters on it.
  if (!call->caller.sees_all) {
    // An adapter's digest tells whoever has that file who draws with it.
    std::set<std::string> own;
    if (options_.lora_directory) {
      for (const loras::Adapter& adapter : options_.lora_directory->list(call->caller.tenant).adapters)
        own.insert(adapter.sha256);
    }
    for (auto& worker : *workers) {
      for (auto* digests : {&worker.adapters, &worker.host_adapters}) {
        std::erase_if(*digests, [&](const std::string& digest) { return !own.contains(digest); });
      }
    }
  }
  json::array array;
  for (auto& worker : *workers) {
    // What it said last is not what it is: it gets no work, and what it held goes to others.
    if (worker.unheard_ms > config::silent_after_ms(options_.settings)) worker.state = "silent";
    array.push_back(worker_json(worker, [&](const std::string& id) {
      const auto tenant = worker.tenants.find(id);
      return call->caller.sees_all || (tenant != worker.tenants.end() && tenant->second == call->caller.tenant);
    }));
  }
  co_return json_response(200, json::serialize(json::object{{"workers", std::move(array)}}))
      .with("Cache-Control", "no-store");
}

}  // namespace ditfleet::gateway
