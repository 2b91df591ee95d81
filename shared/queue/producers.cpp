// Client: submit and cancel.
#include <algorithm>
#include <optional>

#include "shared/core/bytes.h"
#include "shared/core/ids.h"
#include "shared/queue/calls.h"
#include "shared/queue/records.h"

namespace ditfleet::queue {
namespace {

// "created", "existed <id>", "mismatch <id>", "taken", "invalid …": the words of ditfleet_v1_submit.
Result<SubmitOutcome> outcome_of(const std::string& verdict, const std::string& id) {
  if (verdict == "created") return SubmitOutcome{id, false};
  if (verdict.starts_with("existed ")) return SubmitOutcome{verdict.substr(8), true};
  if (verdict.starts_with("mismatch ")) {
    return Error{Code::kIdempotencyMismatch, "[queue] the idempotency key was used for job " + verdict.substr(9) +
                                                 " with another body; use a fresh key for a new job"};
  }
  if (verdict == "taken") return Error{Code::kConflict, "[queue] the job id " + id + " is taken by another job"};
  return invalid_argument("[queue] " + verdict);
}

}  // namespace

asio::awaitable<Result<SubmitOutcome>> Client::submit(const Submission& submission, Deadline deadline) {
  auto many = co_await submit_many(std::span(&submission, 1), deadline);
  if (!many) co_return many.error();
  co_return std::move(many->front());
}

asio::awaitable<Result<std::vector<Result<SubmitOutcome>>>> Client::submit_many(std::span<const Submission> submissions,
                                                                                Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  std::vector<Result<SubmitOutcome>> out;
  out.reserve(submissions.size());
  std::int64_t now_ms = 0;
  if (std::any_of(submissions.begin(), submissions.end(), [](const Submission& s) { return s.deadline_in_ms > 0; })) {
    const auto time = co_await impl->redis_time(deadline);
    if (!time) co_return time.error();
    now_ms = *time;
  }
  while (!submissions.empty()) {
    const auto batch = submissions.first(std::min(submissions.size(), kBatch));
    submissions = submissions.subspan(batch.size());
    std::vector<std::string> ids;
    ids.reserve(batch.size());
    redis::Command command = fcall("submit", 6 + 2 * batch.size());
    command << keys.in() << keys.jobs() << keys.deadline() << keys.open() << keys.last() << keys.events();
    for (const Submission& s : batch) {
      ids.push_back(s.id.empty() ? new_id() : s.id);
      const std::string job = keys.job(ids.back());
      command << job << (s.idempotency_key.empty() ? job : keys.idempotency(s.tenant, s.idempotency_key));
    }
    command << impl->options_.idempotency_ms;
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const Submission& s = batch[i];
      command << ids[i] << s.tenant << s.spec << sha256_hex(s.spec) << (s.idempotency_key.empty() ? 0 : 1)
              << s.traceparent << (s.deadline_in_ms > 0 ? now_ms + s.deadline_in_ms : s.deadline_ms);
    }
    auto reply = co_await impl->call(std::move(command), deadline);
    if (!reply) co_return reply.error();
    for (std::size_t i = 0; i < batch.size(); ++i) {
      out.push_back(i < reply->elements.size() ? outcome_of(reply->elements[i].text, ids[i])
                                               : Result<SubmitOutcome>(internal_error(
                                                     "[queue] submit answered for fewer jobs than it was given")));
    }
  }
  co_return out;
}

asio::awaitable<Result<CancelOutcome>> Client::cancel(const std::string& job, const std::string& tenant,
                                                      Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  const Error not_found{Code::kNotFound, "[queue] there is no job " + job};
  if (!is_valid_id(job)) co_return not_found;
  // Whose mailboxes to write to must be known before the call. One that changes hands in between tells
  // its worker at the next renewal instead.
  auto reply = co_await impl->call(fcall_ro("job", 7) << keys.job(job) << keys.in() << keys.units() << keys.open()
                                                      << keys.specs() << keys.last() << keys.events() << job,
                                   deadline);
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
  co_return not_found;
}

}  // namespace ditfleet::queue
