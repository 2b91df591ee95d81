// A queue in memory for the gateway's handlers: jobs are put in the states that a test wants, and every
// change is an event in the job's stream and in the feed.
#pragma once

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "coordinator/gateway/backend/job_service.h"
#include "shared/core/bytes.h"
#include "shared/core/json.h"

namespace ditfleet::gateway {

class FakeService final : public JobService {
 public:
  explicit FakeService(asio::any_io_executor executor) : arrived_(executor) {}

  std::map<std::string, queue::JobRecord> jobs;
  std::map<std::string, std::vector<queue::Event>> streams;
  std::map<std::string, std::string> blobs;  // results and previews by key
  std::vector<queue::WorkerInfo> worker_infos;
  std::vector<queue::Submission> submissions;
  std::string store_url;      // of links to results; empty: it gives none
  std::optional<Error> down;  // every call fails with it
  int event_reads = 0;

  // --- what happens to a job -------------------------------------------------------------------
  void event(const std::string& job, const std::string& type, int unit,
             std::map<std::string, std::string> fields = {}) {
    queue::Event event;
    event.id = "1700000000000-" + std::to_string(++sequence_);
    event.job = job;
    event.type = type;
    event.unit = unit;
    event.at_ms = 1700000000000;
    event.fields = std::move(fields);
    streams[job].push_back(event);
    feed_.push_back({{event}, false});
    arrived_.cancel();
  }
  void gap() {
    feed_.push_back({{}, true});
    arrived_.cancel();
  }
  void admit(const std::string& id) {
    auto& record = jobs[id];
    record.state = job::State::kReady;
    for (int i = 0; i < record.units; ++i) {
      queue::UnitRecord unit;
      unit.unit = i;
      unit.state = job::State::kReady;
      record.unit_records.push_back(unit);
    }
    event(id, "ready", -1);
  }
  void step(const std::string& id, int unit, int step, int total) {
    auto& u = jobs[id].unit_records.at(static_cast<std::size_t>(unit));
    jobs[id].state = u.state = job::State::kRunning;
    u.step = step;
    u.total_steps = total;
    event(id, "step", unit, {{"step", std::to_string(step)}, {"total", std::to_string(total)}});
  }
  void succeed(const std::string& id, int unit, const std::string& bytes) {
    auto& record = jobs[id];
    auto& u = record.unit_records.at(static_cast<std::size_t>(unit));
    u.state = job::State::kSucceeded;
    results::Manifest manifest;
    manifest.backend = "redis";
    manifest.key = "result:" + id + ":" + std::to_string(unit);
    manifest.media_type = "image/png";
    manifest.bytes = static_cast<std::int64_t>(bytes.size());
    manifest.sha256 = sha256_hex(bytes);
    manifest.width = manifest.height = 64;
    manifest.seed = 7 + unit;
    manifest.nonce = "0123456789abcdef0123456789abcdef";
    u.manifest = manifest.to_json();
    blobs[manifest.key] = bytes;
    event(id, "succeeded", unit);
    for (const auto& other : record.unit_records) {
      if (other.state != job::State::kSucceeded) return;
    }
    record.state = job::State::kSucceeded;
    record.ended_ms = 1700000001000;
    event(id, "succeeded", -1);
  }
  void fail(const std::string& id, const Error& error) {
    jobs[id].state = job::State::kFailed;
    jobs[id].error = error;
    event(id, "failed", -1, {{"message", error.message}});
  }

  asio::awaitable<Result<queue::Feed::Batch>> next(std::chrono::milliseconds block) {
    if (down) co_return *down;
    if (feed_.empty()) {
      arrived_.expires_after(block);
      boost::system::error_code ignored;
      co_await arrived_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    }
    queue::Feed::Batch batch;
    if (!feed_.empty()) {
      batch = feed_.front();
      feed_.pop_front();
    }
    co_return batch;
  }

  // --- JobService ------------------------------------------------------------------------------
  asio::awaitable<Result<std::string>> link_secret(std::int64_t id, std::int64_t) override {
    if (down) co_return *down;
    co_return std::string(32, static_cast<char>(id));
  }
  asio::awaitable<Result<void>> put_input(const std::string& tenant, const std::string& sha256,
                                          std::string bytes) override {
    if (down) co_return *down;
    owned_inputs[tenant][sha256] = static_cast<std::int64_t>(bytes.size());
    blobs[sha256] = std::move(bytes);
    co_return Result<void>();
  }
  asio::awaitable<Result<void>> touch_input(const std::string& tenant, const std::string& sha256) override {
    if (down) co_return *down;
    if (!owned_inputs[tenant].contains(sha256)) co_return not_found("the image '" + sha256 + "' is not stored");
    co_return Result<void>();
  }
  asio::awaitable<Result<std::string>> input(const std::string& tenant, const std::string& sha256) override {
    if (auto own = co_await touch_input(tenant, sha256); !own) co_return own.error();
    co_return blobs[sha256];
  }
  asio::awaitable<Result<void>> remove_input(const std::string& tenant, const std::string& sha256) override {
    if (down) co_return *down;
    if (owned_inputs[tenant].erase(sha256) == 0) co_return not_found("the image '" + sha256 + "' is not stored");
    co_return Result<void>();
  }
  asio::awaitable<Result<std::map<std::string, std::int64_t>>> inputs(const std::string& tenant) override {
    if (down) co_return *down;
    co_return owned_inputs[tenant];
  }
  std::map<std::string, std::map<std::string, std::int64_t>> owned_inputs;  // by tenant
  asio::awaitable<Result<void>> check_room() override { co_return Result<void>(); }
  asio::awaitable<void> maintain() override { co_return; }
  asio::awaitable<Result<queue::SubmitOutcome>> submit(const queue::Submission& s) override {
    if (down) co_return *down;
    submissions.push_back(s);
    const std::string slot = s.tenant + ":" + s.idempotency_key;
    if (!s.idempotency_key.empty() && keys_.contains(slot)) {
      const auto first = jobs.find(keys_[slot]);  // a test may have forgotten it
      if (first != jobs.end() && first->second.spec != s.spec)
        co_return Error{Code::kIdempotencyMismatch, "the key was used with another body", {}};
      co_return queue::SubmitOutcome{keys_[slot], true};
    }
    queue::JobRecord record;
    record.id = s.id.empty() ? "job-" + std::to_string(jobs.size() + 1) : s.id;
    record.tenant = s.tenant;
    record.spec = s.spec;
    record.traceparent = s.traceparent;
    record.created_ms = 1700000000000;
    record.deadline_ms = s.deadline_ms;
    auto spec = parse_json(s.spec);
    if (spec && spec->as_object().contains("n")) record.units = static_cast<int>(spec->as_object().at("n").as_int64());
    if (!s.idempotency_key.empty()) keys_[slot] = record.id;
    const std::string id = record.id;
    jobs[id] = record;
    event(id, "queued", -1);
    co_return queue::SubmitOutcome{id, false};
  }
  asio::awaitable<Result<queue::CancelOutcome>> cancel(const std::string& id, const std::string& view) override {
    auto found = find(id, view);
    if (!found) co_return found.error();
    if (job::is_terminal((*found)->state)) co_return queue::CancelOutcome::kAlreadyEnded;
    (*found)->state = job::State::kCanceled;
    event(id, "canceled", -1);
    co_return queue::CancelOutcome::kCanceled;
  }
  asio::awaitable<Result<queue::PauseOutcome>> pause(const std::string& id, const std::string& view) override {
    co_return set_state(id, view, job::State::kPaused);
  }
  asio::awaitable<Result<queue::PauseOutcome>> resume(const std::string& id, const std::string& view) override {
    co_return set_state(id, view, job::State::kReady);
  }
  Result<queue::PauseOutcome> set_state(const std::string& id, const std::string& view, job::State state) {
    auto found = find(id, view);
    if (!found) return found.error();
    if (job::is_terminal((*found)->state)) return queue::PauseOutcome::kAlreadyEnded;
    if ((*found)->state == job::State::kCanceling) return queue::PauseOutcome::kCanceling;
    (*found)->state = state;
    for (auto& unit : (*found)->unit_records) unit.state = state;
    return queue::PauseOutcome::kDone;
  }
  asio::awaitable<Result<void>> copy_checkpoint(const queue::UnitRef& from, const queue::Submission& to) override {
    if (down) co_return *down;
    if (!checkpoints.contains(from)) co_return not_found("it has no checkpoint");
    checkpoints.insert({to.id, 0});
    co_return Result<void>();
  }
  asio::awaitable<void> drop_checkpoint(const std::string& job) override {
    checkpoints.erase({job, 0});
    co_return;
  }
  std::set<queue::UnitRef> checkpoints;
  asio::awaitable<Result<queue::JobRecord>> job(const std::string& id, const std::string& view) override {
    auto found = find(id, view);
    if (!found) co_return found.error();
    co_return **found;
  }
  asio::awaitable<Result<queue::JobPage>> list(const std::string& view, std::optional<job::State> state, int limit,
                                               const std::string& cursor, bool,
                                               std::function<bool(const queue::JobRecord&)> keep) override {
    if (down) co_return *down;
    queue::JobPage page;
    for (auto it = jobs.rbegin(); it != jobs.rend(); ++it) {
      const auto& record = it->second;
      if (!cursor.empty() && record.id >= cursor) continue;
      if ((!view.empty() && record.tenant != view) || (state && record.state != *state)) continue;
      if (keep && !keep(record)) continue;
      if (static_cast<int>(page.jobs.size()) == limit) {
        page.next_cursor = page.jobs.back().id;
        break;
      }
      page.jobs.push_back(record);
    }
    co_return page;
  }
  asio::awaitable<Result<void>> forget(const queue::JobRecord& record) override {
    if (down) co_return *down;
    jobs.erase(record.id);
    co_return Result<void>();
  }
  asio::awaitable<Result<std::vector<queue::Event>>> events(const std::string& id, const std::string& after,
                                                            int limit) override {
    if (down) co_return *down;
    ++event_reads;
    std::vector<queue::Event> events;
    for (const auto& event : streams[id]) {
      if (sequence_of(event.id) > sequence_of(after) && static_cast<int>(events.size()) < limit)
        events.push_back(event);
    }
    co_return events;
  }
  asio::awaitable<Result<queue::Event>> event(const std::string& id, const std::string& event_id) override {
    if (down) co_return *down;
    for (const auto& event : streams[id]) {
      if (event.id == event_id) co_return event;
    }
    co_return Error{Code::kNotFound, "no such event", {}};
  }
  asio::awaitable<Result<std::vector<queue::WorkerInfo>>> workers() override {
    if (down) co_return *down;
    auto infos = worker_infos;
    for (auto& info : infos) {
      for (const auto& unit : info.units) {
        if (const auto job = jobs.find(unit.job); job != jobs.end()) info.tenants[unit.job] = job->second.tenant;
      }
    }
    co_return infos;
  }
  std::map<std::string, queue::Desired> desired;  // by worker
  asio::awaitable<Result<queue::HistoryPage>> history(const std::string&, int) override {
    if (down) co_return *down;
    co_return queue::HistoryPage{};
  }
  std::optional<queue::FleetForecast> fleet_forecast;
  asio::awaitable<Result<void>> set_desired(const queue::WorkerInfo& worker, queue::Desired state) override {
    desired[worker.name] = state;
    co_return Result<void>();
  }
  asio::awaitable<Result<std::optional<queue::FleetForecast>>> forecast() override {
    if (down) co_return *down;
    co_return fleet_forecast;
  }
  std::map<std::string, queue::JobOutlook> outlooks;
  int outlook_reads = 0;
  asio::awaitable<Result<std::map<std::string, queue::JobOutlook>>> outlook() override {
    ++outlook_reads;
    if (down) co_return *down;
    co_return outlooks;
  }
  std::map<std::string, queue::TenantUse> uses;
  asio::awaitable<Result<std::map<std::string, queue::TenantUse>>> use() override { co_return uses; }
  asio::awaitable<Result<std::string>> result_piece(const results::Manifest& manifest, std::int64_t offset,
                                                    std::int64_t size) override {
    auto whole = blob(manifest.key);
    if (!whole) co_return whole.error();
    co_return whole->substr(static_cast<std::size_t>(offset), static_cast<std::size_t>(size));
  }
  std::string result_link(const results::Manifest& manifest, std::int64_t life_s) override {
    return store_url.empty() ? "" : store_url + "/" + manifest.key + "?life=" + std::to_string(life_s);
  }
  std::string result_origin() override { return store_url; }
  asio::awaitable<Result<std::string>> s3_input(const std::string&, const std::string&, std::int64_t) override {
    co_return not_found("this service has no S3 store");
  }
  asio::awaitable<void> sweep_results() override { co_return; }
  asio::awaitable<Result<std::string>> result(const results::Manifest& manifest) override {
    co_return blob(manifest.key);
  }
  asio::awaitable<Result<std::string>> preview(const std::string& key) override { co_return blob(key); }

 private:
  static long sequence_of(const std::string& id) {
    const auto dash = id.find('-');
    return dash == std::string::npos ? 0 : std::stol(id.substr(dash + 1));
  }
  Result<queue::JobRecord*> find(const std::string& id, const std::string& view) {
    if (down) return *down;
    const auto found = jobs.find(id);
    if (found == jobs.end() || (!view.empty() && found->second.tenant != view))
      return Error{Code::kNotFound, "no such job", {}};
    return &found->second;
  }
  Result<std::string> blob(const std::string& key) {
    const auto found = blobs.find(key);
    if (found == blobs.end()) return Error{Code::kNotFound, "expired", {}};
    return found->second;
  }

  asio::steady_timer arrived_;
  std::deque<queue::Feed::Batch> feed_;
  std::map<std::string, std::string> keys_;
  int sequence_ = 0;
};

// Runs `task` to its end on `context`; other coroutines of the context run meanwhile.
template <class T>
T run_task(asio::io_context& context, asio::awaitable<T> task) {
  std::optional<T> value;
  std::exception_ptr thrown;
  asio::co_spawn(context, std::move(task), [&](std::exception_ptr e, T result) {
    thrown = e;
    if (!e) value.emplace(std::move(result));
  });
  context.restart();
  while (!value && !thrown) context.run_one();
  if (thrown) std::rethrow_exception(thrown);
  return std::move(*value);
}

}  // namespace ditfleet::gateway
