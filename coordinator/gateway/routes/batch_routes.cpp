// Batches: many jobs in one call, as JSON lines. Job `n` of a batch, that of line `n`, has the id "<batch>-<n>", so
// that a batch needs no list of its jobs. The queue's Functions count their ends (functions/journal.lua).
#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <utility>

#include "coordinator/gateway/backend/redis_error.h"
#include "coordinator/gateway/routes/api_context.h"
#include "coordinator/gateway/routes/batch_lines.h"
#include "coordinator/gateway/routes/errors.h"
#include "shared/core/bytes.h"
#include "shared/core/excerpt.h"
#include "shared/core/ids.h"
#include "shared/core/sha256.h"
#include "shared/core/task_group.h"
#include "shared/core/text.h"
#include "shared/job/spec_json.h"
#include "shared/queue/keys.h"
#include "shared/queue/reply_fields.h"
#include "shared/telemetry/metrics.h"

namespace ditfleet::gateway {
namespace {

constexpr std::int64_t kMostBytes = 64 << 20;
constexpr std::size_t kMostReported = 20, kMostKept = 1000;  // bad lines, in an answer and in the batch
constexpr int kAtOnce = 32;                                  // calls of the queue that run beside each other
constexpr std::size_t kLinesPerTurn = 50;                    // then the loop serves others

Deadline soon() { return Deadline::after(std::chrono::seconds(5)); }

Error batch_error(const Error& error) {
  return redis_error(error, "the queue's Redis", "send the same batch again with the same Idempotency-Key",
                     "raise its maxmemory");
}

Result<Response> refuse(const std::vector<BadLine>& bad, std::size_t lines) {
  const BadLine& first = bad.front();
  Error error = first.error;
  error.message = "line " + std::to_string(first.number) + ": " + first.error.message + "; " +
                  std::to_string(bad.size()) + " of " + std::to_string(lines) +
                  " lines cannot run, so none does. Correct them, or send ?on_error=skip to run the others";
  Response response = error_response(error);
  json::object body = parse_json(response.body)->get_object();
  json::array errors;
  for (std::size_t i = 0; i < std::min(bad.size(), kMostReported); ++i) errors.push_back(bad_json(bad[i]));
  body["errors"] = std::move(errors);
  response.body = json::serialize(body);
  return response;
}

queue::Keys keys_of(const ApiContext& context) { return queue::Keys(context.dependencies.queue->options().shard); }

std::string job_id(const std::string& batch, int line) { return batch + "-" + std::to_string(line); }

// Runs `work` for each of `count` items, some beside each other. Stops early if it returns false.
asio::awaitable<void> for_each(std::size_t count, std::function<asio::awaitable<bool>(std::size_t)> work) {
  TaskGroup tasks(co_await asio::this_coro::executor);
  const auto next = std::make_shared<std::size_t>(0);
  for (int i = 0; i < kAtOnce; ++i) {
    tasks.spawn("batch", [](std::shared_ptr<std::size_t> at, std::size_t end, auto& one) -> asio::awaitable<void> {
      while (*at < end) {
        const std::size_t mine = (*at)++;
        auto doing = one(mine);
        if (!co_await std::move(doing)) *at = end;
      }
    }(next, count, work));
  }
  co_await tasks.join();
}

// Completes the spec, as a submission does. The result counts the units.
Result<int> check_line(const ApiContext& context, const std::string& tenant, BatchLine& line) {
  if (line.image) {
    const job::Catalogue& catalogue = context.dependencies.catalogue;
    const std::string& name = line.call.spec.model.empty() ? catalogue.default_model : line.call.spec.model;
    if (const auto model = catalogue.models.find(name); model != catalogue.models.end())
      line.call.complete_for(model->second);
  }
  if (!line.call.spec.resume_from.empty())
    return invalid_argument("resume_from cannot be in a batch; submit the job by POST /v1/jobs", "resume_from");
  auto complete = context.complete(tenant, line.call.spec);
  if (!complete) return line.image ? as_image_error(complete.error(), line.call) : complete.error();
  return *complete->n;
}

struct Counts {
  std::int64_t total = 0, bad = 0, succeeded = 0, failed = 0, canceled = 0;
  std::int64_t created_ms = 0, lines = 0;
  bool cancel_requested = false;
  json::array custom_ids, bad_lines;
  bool ended() const { return succeeded + failed + canceled >= total; }
};

json::object batch_json(const ApiContext& context, CallPtr call, const std::string& id, const Counts& c) {
  const std::string url = context.links(*call).base + "/v1/batches/" + id;
  const char* status = !c.ended()           ? (c.cancel_requested ? "cancelling" : "in_progress")
                       : c.cancel_requested ? "cancelled"
                                            : "completed";
  const double done = static_cast<double>(c.succeeded + c.failed + c.canceled);
  return {{"id", id},
          {"object", "batch"},
          {"status", status},
          {"created_at", c.created_ms / 1000},
          {"progress", c.total > 0 ? done / static_cast<double>(c.total) : 1.0},
          {"request_counts", json::object{{"total", c.total + c.bad},
                                          {"completed", c.succeeded},
                                          {"failed", c.failed + c.bad},
                                          {"canceled", c.canceled}}},
          {"errors", json::array(c.bad_lines.begin(), c.bad_lines.begin() + static_cast<std::ptrdiff_t>(std::min(
                                                                                c.bad_lines.size(), kMostReported)))},
          {"url", url},
          {"results_url", url + "/results"}};
}

// kNotFound for batches of other tenants, too.
asio::awaitable<Result<Counts>> find_batch(const ApiContext& context, CallPtr call, std::string id) {
  const Error missing{Code::kNotFound,
                      "batch '" + excerpt(id, 100) +
                          "' not found: it never existed, has expired or belongs to "
                          "another tenant",
                      {}};
  if (!is_valid_id(id)) co_return missing;
  auto stored =
      co_await context.dependencies.redis->execute(redis::Command("HGETALL") << keys_of(context).batch(id), soon());
  if (!stored) co_return batch_error(stored.error());
  const auto fields = queue::fields_of(*stored);
  const auto number = [&](const char* name) { return leading_integer(queue::text_of(fields, name)); };
  const auto list = [&](const char* name) {
    const auto parsed = parse_json(queue::text_of(fields, name));
    return parsed && parsed->is_array() ? parsed->get_array() : json::array();
  };
  const Counts out{.total = number("total"),
                   .bad = number("bad"),
                   .succeeded = number("succeeded"),
                   .failed = number("failed"),
                   .canceled = number("canceled"),
                   .created_ms = number("created_ms"),
                   .lines = number("lines"),
                   .cancel_requested = fields.contains("cancel_requested"),
                   .custom_ids = list("custom_ids"),
                   .bad_lines = list("bad_lines")};
  const std::string tenant = queue::text_of(fields, "tenant");
  if (tenant.empty() || (!call->caller.sees_all && tenant != call->caller.tenant)) co_return missing;
  co_return out;
}

asio::awaitable<Result<Response>> add_batch(const ApiContext& context, CallPtr call) {
  const Request& request = call->request;
  if (!request.stream)
    co_return status_response(415, "the body is JSON; send JSON lines, a job each, as application/jsonl",
                              "unsupported_media_type");
  if (auto bad = refuse_compressed_body(request)) co_return std::move(*bad);
  const std::string on_error = request.query_value("on_error").value_or("refuse");
  if (on_error != "refuse" && on_error != "skip")
    co_return invalid_argument("on_error is '" + excerpt(on_error, 64) + "'; it must be refuse or skip", "on_error");
  const bool skip = on_error == "skip";
  auto body = co_await context.receive(call, kMostBytes);
  if (!body) co_return unread_body(body.error());
  const std::string key(request.header("Idempotency-Key"));
  const std::string tenant = call->caller.tenant;
  std::string id = "batch_" + new_id();
  if (!key.empty()) {  // the same key is the same batch, with the same jobs
    Sha256 hash;
    hash.update(tenant + "\n" + key);
    id = "batch_" + hash.hex().substr(0, 26);
  }
  const std::string sha256 = sha256_hex(body->bytes), record = keys_of(context).batch(id);
  auto known = co_await context.dependencies.redis->execute(redis::Command("HGET") << record << "sha256", soon());
  if (!known) co_return batch_error(known.error());
  const bool repeated = !known->is_nil();
  if (repeated && known->text != sha256)
    co_return Error{Code::kIdempotencyMismatch,
                    "the Idempotency-Key was used for batch " + id + " with other lines; use a new key",
                    "Idempotency-Key"};
  const std::size_t bytes = body->bytes.size();
  std::function<Result<ParsedBatch>()> work = [text = std::move(body->bytes)] { return parse_batch(text); };
  auto parsed = co_await context.off_loop<ParsedBatch>(call, bytes, std::move(work));
  body->counted.reset();
  if (!parsed) co_return parsed.error();
  const std::size_t lines = parsed->lines.size() + parsed->bad.size();
  const bool adapters = std::ranges::any_of(parsed->lines, [](const BatchLine& line) {
    return !line.call.spec.loras.empty() || !line.call.spec.preset.empty();
  });
  if (adapters) {
    if (auto fresh = co_await context.refresh_adapters(); !fresh) co_return fresh.error();
  }

  const auto executor = co_await asio::this_coro::executor;
  std::vector<queue::Submission> jobs;
  json::array custom_ids, bad_lines;
  std::int64_t units = 0;
  for (std::size_t i = 0; i < parsed->lines.size(); ++i) {
    if (i % kLinesPerTurn == 0) co_await asio::post(executor, asio::use_awaitable);
    BatchLine& line = parsed->lines[i];
    const auto made = check_line(context, tenant, line);
    if (!made) {
      parsed->bad.push_back({line.number, line.custom_id, made.error()});
      continue;
    }
    const job::JobSpec& spec = line.call.spec;
    for (const job::Field field : {job::Field("image"), job::Field("mask")}) {
      for (const std::string& sha256 : spec.fields.images(field)) {
        auto known = co_await context.service.touch_input(tenant, sha256);
        if (!known && known.error().code != Code::kNotFound) co_return known.error();
        if (!known)
          parsed->bad.push_back(
              {line.number, line.custom_id, invalid_argument(known.error().message, std::string(field.name()))});
      }
    }
    if (!parsed->bad.empty() && parsed->bad.back().number == line.number) continue;
    jobs.push_back({.id = job_id(id, line.number),
                    .tenant = tenant,
                    .spec = job::to_json(spec),
                    .units = *made,
                    .idempotency_key = {},
                    .traceparent = call->traceparent,
                    .deadline_in_ms = spec.deadline_ms.value_or(0)});
    units += *made;
    if (!line.custom_id.empty()) custom_ids.push_back(json::array{line.number, line.custom_id});
    line = {};
  }
  std::ranges::sort(parsed->bad, {}, &BadLine::number);
  if (!parsed->bad.empty() && (!skip || jobs.empty())) co_return refuse(parsed->bad, lines);

  // The whole batch has to fit into the tenant's quota.
  const auto quota = config::quotas_of(context.dependencies.settings, tenant).queued_units;
  auto uses = co_await context.service.use();
  if (!uses) co_return uses.error();
  if (const auto used = (*uses)[tenant].units; !repeated && quota > 0 && used + units > quota) {
    static const telemetry::Counters refusals("ditfleet_quota_refusals_total");
    refusals({tenant, "queued_units"}).Increment();
    co_return Error{.code = units > quota ? Code::kPayloadTooLarge : Code::kResourceExhausted,
                    .message = "tenant '" + tenant + "' has " + std::to_string(used) +
                               " units in open jobs, and the batch has " + std::to_string(units) +
                               "; quotas.queued_units is " + std::to_string(quota),
                    .retry_after = std::chrono::seconds(units > quota ? 0 : 5)};
  }

  for (std::size_t i = 0; i < std::min(parsed->bad.size(), kMostKept); ++i)
    bad_lines.push_back(bad_json(parsed->bad[i]));
  if (!repeated) {
    const auto& settings = context.dependencies.settings.queue;
    std::vector<redis::Command> store;
    store.push_back(std::move(redis::Command("HSET")
                              << record << "tenant" << tenant << "sha256" << sha256 << "total"
                              << static_cast<std::int64_t>(jobs.size()) << "bad"
                              << static_cast<std::int64_t>(parsed->bad.size()) << "created_ms" << unix_ms() << "lines"
                              << parsed->total << "custom_ids" << json::serialize(custom_ids) << "bad_lines"
                              << json::serialize(bad_lines)));
    store.push_back(std::move(redis::Command("PEXPIRE") << record << settings.max_age_ms + settings.retention_ms));
    for (auto& done : co_await context.dependencies.redis->execute_all(std::move(store), soon()))
      if (!done) co_return batch_error(done.error());
  }

  std::optional<Error> failed;
  co_await for_each(jobs.size(), [&](std::size_t i) -> asio::awaitable<bool> {
    auto outcome = co_await context.service.submit(jobs[i]);
    if (!outcome && !failed) failed = outcome.error();
    co_return !failed;
  });
  if (failed && !repeated) {  // all or none
    co_await for_each(jobs.size(), [&](std::size_t i) -> asio::awaitable<bool> {
      (void)co_await context.service.cancel(jobs[i].id, tenant);
      co_return true;
    });
    (void)co_await context.dependencies.redis->execute(redis::Command("DEL") << record, soon());
  }
  if (failed) co_return *failed;
  // Some may have ended meanwhile.
  const auto counts = co_await find_batch(context, call, id);
  if (!counts) co_return counts.error();
  co_return json_response(202, batch_json(context, call, id, *counts)).with("Location", "/v1/batches/" + id);
}

asio::awaitable<Result<Response>> get_batch(const ApiContext& context, CallPtr call) {
  const auto counts = co_await find_batch(context, call, call->param(0));
  if (!counts) co_return counts.error();
  co_return json_response(200, batch_json(context, call, call->param(0), *counts)).with("Cache-Control", "no-store");
}

// The numbers of a batch's lines that are jobs.
std::vector<int> lines_of(const Counts& counts) {
  std::vector<bool> bad(static_cast<std::size_t>(counts.lines) + 1);
  for (const json::value& one : counts.bad_lines) bad.at(one.as_object().at("line").to_number<std::size_t>()) = true;
  std::vector<int> out;
  for (int line = 1; line <= counts.lines; ++line)
    if (!bad[static_cast<std::size_t>(line)]) out.push_back(line);
  return out;
}

asio::awaitable<Result<Response>> cancel_batch(const ApiContext& context, CallPtr call) {
  auto counts = co_await find_batch(context, call, call->param(0));
  if (!counts) co_return counts.error();
  const std::string id = call->param(0);
  auto marked = co_await context.dependencies.redis->execute(
      redis::Command("HSET") << keys_of(context).batch(id) << "cancel_requested" << 1, soon());
  if (!marked) co_return batch_error(marked.error());
  const auto lines = lines_of(*counts);
  std::optional<Error> failed;
  co_await for_each(lines.size(), [&](std::size_t i) -> asio::awaitable<bool> {
    auto done = co_await context.service.cancel(job_id(id, lines[i]), call->caller.view());
    if (!done && done.error().code != Code::kNotFound) failed = done.error();
    co_return !failed;
  });
  if (failed) co_return *failed;
  counts = co_await find_batch(context, call, call->param(0));
  if (!counts) co_return counts.error();
  co_return json_response(202, batch_json(context, call, id, *counts));
}

asio::awaitable<Result<Response>> get_results(const ApiContext& context, CallPtr call) {
  auto counts = co_await find_batch(context, call, call->param(0));
  if (!counts) co_return counts.error();
  Response response;
  response.content_type = "application/jsonl";
  response.with("Cache-Control", "no-store");
  Response refused;
  const bool is_head = call->request.method == "HEAD";
  const auto counted = is_head ? nullptr : context.open_stream(*call, refused);
  if (!counted && !is_head) co_return refused;
  response.stream = [&context, call, counted, counts = std::move(*counts)](Sink& sink) -> asio::awaitable<void> {
    const std::string id = call->param(0);
    std::map<std::int64_t, json::value> custom_ids;
    for (const json::value& one : counts.custom_ids)
      custom_ids[one.as_array().at(0).to_number<std::int64_t>()] = one.as_array().at(1);
    std::string text;
    for (const json::value& bad : counts.bad_lines) {
      const json::object& error = bad.as_object();
      text += json::serialize(json::object{
                  {"id", nullptr},
                  {"custom_id", error.at("custom_id")},
                  {"line", error.at("line")},
                  {"state", "refused"},
                  {"response", nullptr},
                  {"error", json::object{{"message", error.at("message")}, {"param", error.at("param")}}}}) +
              "\n";
    }
    for (const int line : lines_of(counts)) {
      const std::string job = job_id(id, line);
      auto record = co_await context.service.job(job, call->caller.view());
      if (!record && record.error().code == Code::kNotFound) continue;  // a blank line, or it has expired
      if (!record) {
        sink.abort();
        co_return;
      }
      const bool ended = job::is_terminal(record->state), good = record->state == job::State::kSucceeded;
      const auto custom = custom_ids.find(line);
      json::object row{
          {"id", job},           {"custom_id", custom == custom_ids.end() ? json::value(nullptr) : custom->second},
          {"line", line},        {"state", job::state_name(record->state)},
          {"response", nullptr}, {"error", nullptr}};
      if (good)
        row["response"] =
            json::object{{"status_code", 200}, {"body", job_json(*record, context.links(*call), /*with_units=*/true)}};
      if (ended && !good) {
        const Error cause = cause_of(*record);
        row["error"] = json::object{{"code", code_name(cause.code)}, {"message", cause.message}};
      }
      text += json::serialize(row) + "\n";
      if (text.size() < 64 << 10) continue;
      if (!co_await sink.write(std::exchange(text, {}))) co_return;
    }
    co_await sink.write(std::move(text));
  };
  co_return response;
}

}  // namespace

void add_batch_routes(Router& router) {
  router.add({.method = "POST", .pattern = "/v1/batches", .handler = add_batch, .streams_body = true});
  router.add({"GET", "/v1/batches/{id}", get_batch});
  router.add({"POST", "/v1/batches/{id}/cancel", cancel_batch});
  router.add({"GET", "/v1/batches/{id}/results", get_results});
}

}  // namespace ditfleet::gateway
