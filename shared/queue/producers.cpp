// Client: the calls of producers.
#include <algorithm>
#include <optional>

#include "shared/core/bytes.h"
#include "shared/core/ids.h"
#include "shared/queue/calls.h"
#include "shared/queue/records.h"
#include "shared/telemetry/metrics.h"

namespace ditfleet::queue {

std::optional<Error> refusal_of(const std::string& verdict, const std::string& id, const std::string& tenant,
                                const Quota& quota, std::int64_t units, std::size_t spec_bytes) {
  if (verdict.starts_with("mismatch ")) {
    return Error{Code::kIdempotencyMismatch, "[queue] the idempotency key was used for job " + verdict.substr(9) +
                                                 " with another spec; use a new key for a new job"};
  }
  if (verdict == "taken")
    return Error{Code::kConflict, "[queue] the job id " + id + " belongs to another job; use another id"};
  if (!verdict.starts_with("quota ")) return std::nullopt;
  const std::string kind = verdict.substr(6, 5);
  static const telemetry::Counters refusals("ditfleet_quota_refusals_total");
  refusals({tenant, kind == "queue" ? "max_queued" : "queued_" + kind}).Increment();
  const auto bytes = static_cast<std::int64_t>(spec_bytes);
  const bool never = kind == "units" ? units > quota.units : kind == "bytes" && bytes > quota.bytes;
  const auto wants = [&](const char* what, std::int64_t more, const char* option, std::int64_t most) {
    return std::string(what) + " in open jobs and asks for " + std::to_string(more) + "; " + option + " is " +
           std::to_string(most);
  };
  return Error{
      .code = never ? Code::kPayloadTooLarge : Code::kResourceExhausted,
      .message = "[queue] tenant '" + tenant + "' has " + verdict.substr(12) +
                 (kind == "units" ? wants(" units", units, "quotas.queued_units", quota.units)
                  : kind == "bytes"
                      ? wants(" bytes of specs", bytes, "quotas.queued_bytes", quota.bytes)
                      : wants(" units", units, "the queue is full, and its share of queue.max_queued", quota.share)),
      .retry_after = std::chrono::seconds(never ? 0 : 5)};
}

asio::awaitable<Result<SubmitOutcome>> Client::submit(const Submission& submission, Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  const std::string id = submission.id.empty() ? new_id() : submission.id;
  std::int64_t deadline_ms = submission.deadline_ms;
  if (submission.deadline_in_ms > 0) {
    const auto now_ms = co_await impl->redis_time(deadline);
    if (!now_ms) co_return now_ms.error();
    deadline_ms = *now_ms + submission.deadline_in_ms;
  }
  const bool has_key = !submission.idempotency_key.empty();
  const std::string job = keys.job(id);
  redis::Command command = fcall("submit", 8);
  command << keys.in() << keys.jobs() << keys.deadline() << keys.open() << keys.last() << keys.events() << job
          << (has_key ? keys.idempotency(submission.tenant, submission.idempotency_key) : job);
  command << impl->options_.idempotency_ms << id << submission.tenant << submission.spec << sha256_hex(submission.spec)
          << (has_key ? 1 : 0) << submission.traceparent << deadline_ms;
  const Quota quota = impl->quota(submission.tenant);
  command << submission.units << quota.packed();
  // Outside the co_await, because GCC 12 evaluates both branches of a conditional inside one.
  auto submitting = impl->options_.wait_replicas > 0 ? impl->call_with_replicas(std::move(command), deadline)
                                                     : impl->call(std::move(command), deadline);
  auto reply = co_await std::move(submitting);
  if (!reply) co_return reply.error();
  const std::string& verdict = reply->text;
  if (verdict == "created") co_return SubmitOutcome{id, false};
  if (verdict.starts_with("existed ")) co_return SubmitOutcome{verdict.substr(8), true};
  const auto refusal = refusal_of(verdict, id, submission.tenant, quota, submission.units, submission.spec.size());
  co_return refusal.value_or(invalid_argument("[queue] " + verdict));
}

asio::awaitable<Result<CancelOutcome>> Client::cancel(const std::string& job, const std::string& tenant,
                                                      Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  const Error missing = not_found("[queue] no such job: " + job);
  if (!is_valid_id(job)) co_return missing;
  // The keys of the mailboxes must be known before the call. A worker that is assigned a unit in between is asked to
  // stop at its next renewal.
  auto reply = co_await impl->read_job(job, deadline);
  if (!reply) co_return reply.error();
  const StoredJob stored = parse_job(job, *reply);
  if (!stored.same_as.empty()) co_return co_await cancel(stored.same_as, tenant, deadline);
  std::vector<std::string> owners;
  for (const UnitRecord& unit : stored.record.unit_records) {
    const bool held = unit.state == job::State::kAssigned || unit.state == job::State::kRunning;
    if (held && std::find(owners.begin(), owners.end(), unit.owner) == owners.end()) owners.push_back(unit.owner);
  }
  redis::Command command = fcall("cancel", 11 + owners.size());
  command << keys.in() << keys.ready() << keys.delayed() << keys.lease() << keys.deadline() << keys.units()
          << keys.open() << keys.specs() << keys.last() << keys.events() << keys.job(job);
  for (const std::string& owner : owners) command << keys.mailbox(owner);
  command << job << tenant;
  for (const std::string& owner : owners) command << owner;
  reply = co_await impl->call(std::move(command), deadline);
  if (!reply) co_return reply.error();
  if (reply->text == "canceled") co_return CancelOutcome::kCanceled;
  if (reply->text == "requested") co_return CancelOutcome::kRequested;
  if (reply->text == "ended") co_return CancelOutcome::kAlreadyEnded;
  co_return missing;
}

namespace {

Result<PauseOutcome> pause_outcome(const std::string& verdict, const std::string& job) {
  if (verdict == "ended") return PauseOutcome::kAlreadyEnded;
  if (verdict == "canceling") return PauseOutcome::kCanceling;
  if (verdict == "notfound") return not_found("[queue] no such job: " + job);
  return PauseOutcome::kDone;
}

}  // namespace

asio::awaitable<Result<PauseOutcome>> Client::Impl::set_paused(bool paused, std::string job, std::string tenant,
                                                               Deadline deadline) {
  if (!is_valid_id(job)) co_return pause_outcome("notfound", job);
  redis::Command command = paused ? fcall("pause", 8) : fcall("resume", 7);
  command << keys_.ready() << keys_.delayed();
  if (paused) command << keys_.lease();
  command << keys_.units() << keys_.open() << keys_.last() << keys_.events() << keys_.job(job) << job << tenant;
  const auto reply = co_await call(std::move(command), deadline);
  if (!reply) co_return reply.error();
  if (reply->text.starts_with("same ")) co_return co_await set_paused(paused, reply->text.substr(5), tenant, deadline);
  co_return pause_outcome(reply->text, job);
}

asio::awaitable<Result<PauseOutcome>> Client::pause(const std::string& job, const std::string& tenant,
                                                    Deadline deadline) {
  const auto impl = impl_;
  co_return co_await impl->set_paused(true, job, tenant, deadline);
}

asio::awaitable<Result<PauseOutcome>> Client::resume(const std::string& job, const std::string& tenant,
                                                     Deadline deadline) {
  const auto impl = impl_;
  co_return co_await impl->set_paused(false, job, tenant, deadline);
}

asio::awaitable<Result<bool>> Client::forget(const std::string& job, Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  if (!is_valid_id(job)) co_return false;
  // A sweep of this job alone, without retention. The events of other jobs stay.
  redis::Command sweep = fcall("sweep", 4);
  sweep << keys.jobs() << keys.open() << keys.events() << keys.job(job) << 0
        << std::max(impl->options_.retention_ms, kKeepEventsMs) << job;
  const auto gone = co_await impl->call(std::move(sweep), deadline);
  if (!gone) co_return gone.error();
  co_return gone->integer == 1;
}

}  // namespace ditfleet::queue
