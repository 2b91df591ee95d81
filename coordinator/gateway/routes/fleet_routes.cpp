// Where the time went: the timeline of a job, slow jobs, and the last hour of the fleet.
#include <algorithm>
#include <map>

#include "coordinator/gateway/events/fleet_history.h"
#include "coordinator/gateway/routes/api_context.h"
#include "coordinator/gateway/routes/errors.h"
#include "shared/core/text.h"
#include "shared/core/wall_clock.h"
#include "shared/telemetry/spans.h"

namespace ditfleet::gateway {
namespace {

constexpr int kMaxEvents = 10'000;  // of a job that its timeline shows; the oldest ones
constexpr int kDefaultSlow = 20, kMaxSlow = 200, kMostMinutes = 60;
constexpr int kMaxHistory = 1000;  // jobs per page

json::array spans_value(const std::vector<queue::Span>& spans) {
  json::array out;
  for (const auto& span : spans)
    out.push_back(json::object{{"name", span.name}, {"begin_us", span.begin_us}, {"us", span.us}});
  return out;
}

// The fields `blame`, which is null or the first of the fields `over`, and `worker_speed`.
void add_verdict(json::object& out, const FleetHistory::Verdict& verdict, const std::string& worker) {
  json::array over;
  for (const auto& blame : verdict.over) {
    over.push_back(json::object{{"phase", blame.phase},
                                {"us", blame.us},
                                {"expected_us", blame.expected_us},
                                {"over_us", blame.us - blame.expected_us},
                                {"than", blame.than},
                                {"worker", text_or_null(verdict.speed && blame.on_worker ? worker : std::string())}});
  }
  out["blame"] = over.empty() ? json::value(nullptr) : over.front();
  out["over"] = std::move(over);
  out["worker_speed"] = speed_value(verdict.speed);
}

// What the worker of an open unit does. `event_ms`: the latest event of the unit.
json::object holder_value(const config::Settings& settings, const queue::UnitRecord& unit, std::int64_t event_ms,
                          const std::vector<queue::WorkerInfo>& infos) {
  json::object out{{"worker", queue::worker_name(unit.owner)}, {"state", "gone"}, {"others", false}};
  for (const auto& info : infos) {
    const bool silent = info.unheard_ms > config::silent_after_ms(settings);
    if (info.owner() != unit.owner) {
      if (info.state == "ready" && !silent) out["others"] = true;
      continue;
    }
    out["state"] = silent ? "silent" : info.state;
    out["unheard_ms"] = info.unheard_ms;
    const std::int64_t now_ms = info.heartbeat_ms + info.unheard_ms;  // by Redis' clock
    out["event_ago_ms"] = std::max<std::int64_t>(0, now_ms - std::max({event_ms, unit.assigned_ms, unit.started_ms}));
    // A worker renews its leases about as often as it sends heartbeats.
    if (silent) out["lease_ms"] = std::max<std::int64_t>(0, settings.queue.lease_ms - info.unheard_ms);
  }
  return out;
}

struct Attempt {
  std::string worker, reason, back;  // back: why the unit was returned to the queue
  std::int64_t assigned_ms = 0, started_ms = 0, ended_ms = 0;
  int step = 0, total_steps = 0;  // the last step that it reported; 0: none
};

// The attempts of each unit, oldest first.
std::map<int, std::vector<Attempt>> attempts_in(const std::vector<queue::Event>& events) {
  std::map<int, std::vector<Attempt>> out;
  for (const auto& event : events) {
    auto& attempts = out[event.unit];
    if (event.type == "assigned") {
      attempts.push_back(
          {.worker = event.field("worker"), .reason = event.field("reason"), .back = {}, .assigned_ms = event.at_ms});
    } else if (attempts.empty() || attempts.back().ended_ms > 0) {
      continue;
    } else if (event.type == "started") {
      attempts.back().started_ms = event.at_ms;
    } else if (event.type == "step") {
      attempts.back().step = number_of(event.field("step"), 0).value_or(0);
      attempts.back().total_steps = number_of(event.field("total"), 0).value_or(0);
    } else if (event.type == "ready") {
      attempts.back().ended_ms = event.at_ms;
      const std::string message = event.field("message");
      attempts.back().back = event.field("reason") + (message.empty() ? "" : ": " + message);
    } else if (const auto state = job::state_from_name(event.type); state && job::is_terminal(*state)) {
      attempts.back().ended_ms = event.at_ms;
    }
  }
  return out;
}

json::array attempts_value(const std::vector<Attempt>& attempts) {
  json::array out;
  for (const Attempt& a : attempts) {
    out.push_back(json::object{{"worker", a.worker},
                               {"reason", text_or_null(a.reason)},
                               {"assigned_ms", a.assigned_ms},
                               {"started_ms", a.started_ms},
                               {"ended_ms", a.ended_ms},
                               {"step", a.step},
                               {"total_steps", a.total_steps},
                               {"back", text_or_null(a.back)}});
  }
  return out;
}

// Where the tracing backend shows the job's trace, or null. `form`: telemetry.trace_url.
json::value trace_url(std::string form, const std::string& traceparent) {
  constexpr std::string_view kPlace = "{trace_id}";
  const auto trace = telemetry::SpanContext::parse(traceparent);
  if (form.empty() || !trace.valid()) return nullptr;
  if (const auto at = form.find(kPlace); at != std::string::npos) form.replace(at, kPlace.size(), trace.trace_id);
  return json::value(form);
}

asio::awaitable<Result<Response>> get_timeline(const ApiContext& context, CallPtr call) {
  auto record = co_await context.find_job(call);
  if (!record) co_return record.error();
  // Events expire with the job. Without them the record alone is shown.
  auto events = co_await context.service.events(record->id, "0", kMaxEvents);
  if (!events && events.error().code != Code::kNotFound) co_return events.error();
  if (!events) events = std::vector<queue::Event>();
  auto attempts = attempts_in(*events);
  std::map<int, std::int64_t> last_ms;  // the latest event of each unit
  for (const auto& event : *events) last_ms[event.unit] = event.at_ms;
  json::object body = co_await context.describe(*record, call, true);
  const std::int64_t now_ms = unix_ms();
  const auto held = [](const queue::UnitRecord& unit) { return unit.ended_ms == 0 && !unit.owner.empty(); };
  std::vector<queue::WorkerInfo> infos;
  if (std::any_of(record->unit_records.begin(), record->unit_records.end(), held)) {
    auto workers = co_await context.service.workers();
    if (!workers) co_return workers.error();
    infos = std::move(*workers);
  }
  for (json::value& value : body["unit_records"].as_array()) {
    json::object& unit = value.as_object();
    const auto& from = *find_unit(*record, static_cast<int>(unit["unit"].as_int64()));
    auto& tried = attempts[from.unit];
    const std::string worker(queue::worker_name(from.owner));
    if (tried.empty() && !worker.empty())
      tried.push_back({worker, {}, {}, from.assigned_ms, from.started_ms, from.ended_ms});
    std::int64_t earlier_ms = 0;
    for (const Attempt& a : tried) {
      if (!a.back.empty()) earlier_ms += a.ended_ms - a.assigned_ms;
    }
    queue::JobSummary summary{.id = record->id,
                              .unit = from.unit,
                              .class_key = record->class_key,
                              .worker = worker,
                              .steps = static_cast<int>(unit["total_steps"].as_int64()),
                              .cost_us = record->cost_us,
                              .created_ms = record->created_ms,
                              .ready_ms = record->ready_ms,
                              .first_assigned_ms = tried.empty() ? 0 : tried.front().assigned_ms,
                              .assigned_ms = from.assigned_ms,
                              .started_ms = from.started_ms,
                              .ended_ms = from.ended_ms,
                              .earlier_ms = earlier_ms,
                              .phases_us = from.phases_us};
    const auto spans = queue::spans_of(summary, now_ms);
    unit["attempts"] = attempts_value(tried);
    unit["spans"] = spans_value(spans);
    unit["predicted_us"] = record->cost_us;
    unit["actual_us"] = from.started_ms > 0 && from.ended_ms > 0 ? json::value((from.ended_ms - from.started_ms) * 1000)
                                                                 : json::value(nullptr);
    add_verdict(unit, context.hub->history().verdict(summary, now_ms), worker);
    unit["holder"] = nullptr;
    if (held(from)) unit["holder"] = holder_value(context.dependencies.settings, from, last_ms[from.unit], infos);
  }
  body["now_ms"] = now_ms;
  body["trace_url"] = trace_url(context.dependencies.settings.telemetry.trace_url, record->traceparent);
  co_return json_response(200, body).with("Cache-Control", "no-store");
}

asio::awaitable<Result<Response>> list_slow(const ApiContext& context, CallPtr call) {
  int limit = kDefaultSlow, minutes = kMostMinutes;
  std::string class_key;
  for (const auto& [name, value] : call->request.query) {
    if (name == "class") {
      class_key = value;
    } else if (name == "limit") {
      const auto asked = parse_limit(value, kMaxSlow);
      if (!asked) co_return asked.error();
      limit = *asked;
    } else if (name == "minutes") {
      const auto asked = number_of(value, 1, kMostMinutes);
      if (!asked) co_return invalid_argument("minutes must be a whole number from 1 to 60", name);
      minutes = *asked;
    } else {
      co_return invalid_argument("unknown parameter '" + name + "'; supported are class, limit and minutes", name);
    }
  }
  FleetHistory& history = context.hub->history();
  const std::int64_t now_ms = unix_ms();
  json::array jobs;
  for (const auto& job : history.slow(call->caller.view(), class_key, static_cast<std::size_t>(limit), now_ms,
                                      std::int64_t{60'000} * minutes)) {
    const auto spans = queue::spans_of(job, now_ms);
    json::object row{{"id", job.id},
                     {"state", job::state_name(job.state)},
                     {"tenant", job.tenant},
                     {"model", job.model},
                     {"class", job.class_key},
                     {"worker", job.worker},
                     {"units", job.units},
                     {"attempts", job.attempts},
                     {"steps", job.steps},
                     {"adapters", job.adapters},
                     {"error", text_or_null(job.error)},
                     {"created_ms", job.created_ms},
                     {"ended_ms", job.ended_ms},
                     {"total_us", (job.ended_ms - job.created_ms) * 1000},
                     {"spans", spans_value(spans)}};
    add_verdict(row, history.verdict(job, now_ms), job.worker);
    jobs.push_back(std::move(row));
  }
  co_return json_response(200, {{"object", "list"}, {"jobs", std::move(jobs)}}).with("Cache-Control", "no-store");
}

json::object throughput_value(const FleetHistory& history, std::int64_t now_ms) {
  const auto buckets = history.ended(now_ms);
  json::object out{{"bucket_ms", FleetHistory::kBucketMs},
                   {"until_ms", (now_ms / FleetHistory::kBucketMs + 1) * FleetHistory::kBucketMs}};
  for (std::size_t end = 0; end < FleetHistory::kEnds.size(); ++end) {
    json::array counts;
    for (const auto& bucket : buckets) counts.push_back(bucket[end]);
    out[job::state_name(FleetHistory::kEnds[end])] = std::move(counts);
  }
  return out;
}

json::array classes_value(FleetHistory& history, std::int64_t now_ms) {
  json::array out;
  for (const auto& one : history.classes(now_ms)) {
    json::object phases;
    for (std::size_t i = 0; i < one.phases.size(); ++i) {
      if (const auto& p = one.phases[i])
        phases[FleetHistory::kPhases[i]] = {{"p50_us", (*p)[0]}, {"p90_us", (*p)[1]}, {"p99_us", (*p)[2]}};
    }
    out.push_back(json::object{{"class", one.name}, {"units", one.units}, {"phases", std::move(phases)}});
  }
  return out;
}

// A run is [job, unit, from_ms, to_ms, end], because there are thousands. The job of another tenant is null.
json::array runs_value(const std::deque<FleetHistory::Run>& runs, const Caller& caller) {
  json::array out;
  for (const auto& run : runs) {
    const bool visible = caller.sees_all || run.tenant == caller.tenant;
    out.push_back(json::array{visible ? json::value(run.job) : json::value(nullptr), run.unit, run.from_ms, run.to_ms,
                              text_or_null(run.end)});
  }
  return out;
}

asio::awaitable<Result<Response>> get_fleet(const ApiContext& context, CallPtr call) {
  auto infos = co_await context.service.workers();
  if (!infos) co_return infos.error();
  FleetHistory& history = context.hub->history();
  const std::int64_t now_ms = unix_ms();
  const Caller& caller = call->caller;
  json::array queue, workers;
  for (const auto& row : history.queue_now()) {
    if (!caller.sees_all && row.tenant != caller.tenant) continue;
    queue.push_back(json::object{{"model", row.model},
                                 {"tenant", row.tenant},
                                 {"queued", row.queued},
                                 {"ready", row.ready},
                                 {"assigned", row.assigned},
                                 {"running", row.running},
                                 {"oldest_ms", row.oldest_ms}});
  }
  auto runs = history.runs(now_ms);
  for (const auto& info : *infos) {
    json::object worker = worker_json(
        info, [](const std::string&) { return false; }, std::nullopt);
    for (const char* name : {"jobs", "units", "adapters", "host_adapters", "warm_classes", "empty_in_ms"})
      worker.erase(name);
    worker["adapters_in_slots"] = info.adapters.size();
    worker["adapters_in_host"] = info.host_adapters.size();
    worker["warm_classes"] = info.warm_classes.size();
    if (info.unheard_ms > config::silent_after_ms(context.dependencies.settings)) worker["state"] = "silent";
    worker["speed"] = speed_value(history.speed_of(info.name, now_ms));
    const auto own = runs.find(info.name);
    worker["runs"] = own == runs.end() ? json::array() : runs_value(own->second, caller);
    if (own != runs.end()) runs.erase(own);
    workers.push_back(std::move(worker));
  }
  for (const auto& [name, left] : runs)
    workers.push_back(json::object{{"name", name}, {"state", "gone"}, {"runs", runs_value(left, caller)}});
  co_return json_response(200, {{"now_ms", now_ms},
                                {"throughput", throughput_value(history, now_ms)},
                                {"classes", classes_value(history, now_ms)},
                                {"queue", std::move(queue)},
                                {"queue_complete", history.complete()},
                                {"workers", std::move(workers)}})
      .with("Cache-Control", "no-store");
}

Response history_response(const queue::HistoryPage& page) {
  json::array jobs;
  for (const auto& job : page.jobs) {
    jobs.push_back(json::object{{"created_ms", job.created_ms},
                                {"tenant", job.tenant},
                                {"class", job.class_key},
                                {"steps", job.steps},
                                {"units", job.units},
                                {"adapter", text_or_null(job.adapter)},
                                {"state", job::state_name(job.state)},
                                {"attempts", job.attempts},
                                {"total_ms", job.total_ms},
                                {"run_ms", job.run_ms > 0 ? json::value(job.run_ms) : json::value(nullptr)},
                                {"worker", text_or_null(job.worker)}});
  }
  return json_response(200, {{"object", "list"}, {"jobs", std::move(jobs)}, {"next_cursor", page.next_cursor}})
      .with("Cache-Control", "no-store");
}

asio::awaitable<Result<Response>> list_history(const ApiContext& context, CallPtr call) {
  int limit = kMaxHistory;
  std::string after = "0";
  for (const auto& [name, value] : call->request.query) {
    if (name == "after") {
      after = value;
    } else if (name == "limit") {
      const auto asked = parse_limit(value, kMaxHistory);
      if (!asked) co_return asked.error();
      limit = *asked;
    } else {
      co_return invalid_argument("unknown parameter '" + name + "'; supported are after and limit", name);
    }
  }
  auto page = co_await context.service.history(after, limit);
  if (!page) co_return page.error();
  constexpr std::size_t kRowBytes = 300;
  const std::size_t bytes = page->jobs.size() * kRowBytes;
  std::function<Result<Response>()> work = [page = std::move(*page)] { return history_response(page); };
  co_return co_await context.off_loop<Response>(call, bytes, std::move(work));
}

}  // namespace

void add_fleet_routes(Router& router) {
  router.add({"GET", "/v1/history", list_history, Access::kAdministrator});
  router.add({"GET", "/v1/jobs/slow", list_slow});
  router.add({"GET", "/v1/jobs/{id}/timeline", get_timeline});
  router.add({"GET", "/v1/fleet", get_fleet});
}

}  // namespace ditfleet::gateway
