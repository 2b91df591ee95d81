// The queue of one shard: every state transition as a typed call. Each is one Function of
// functions/*.lua (README.md documents their KEYS and ARGV for other clients), atomic, checked before it
// writes, and timed by Redis alone.
//
// Threads: all calls from the connection's executor (one thread or a strand). Nothing blocks it.
// Errors of every call: kUnavailable (not connected, connection lost; the transition may have happened:
// all are safe to repeat), kDeadlineExceeded, kConflict (stale epoch or nonce, wrong state), and what is
// said below.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "shared/core/deadline.h"
#include "shared/core/result.h"
#include "shared/queue/types.h"

namespace ditfleet::redis {
class Connection;
}

namespace ditfleet::queue {

namespace asio = boost::asio;

struct QueueOptions {
  int shard = 0;
  std::int64_t lease_ms = 5000;           // of assigned and running units
  std::int64_t retention_ms = 3'600'000;  // of ended jobs, their events and idempotency keys' jobs
  std::int64_t idempotency_ms = 86'400'000;
  int max_attempts = 3;                 // errors
  int max_crashes = 2;                  // workers a job may take down
  std::int64_t retry_backoff_ms = 500;  // doubled each time, with jitter
  std::int64_t retry_backoff_max_ms = 30'000;
};

enum class CancelOutcome { kCanceled, kRequested, kAlreadyEnded };

class Client {
 public:
  // `connection` carries ordinary commands; blocking reads open connections of their own like it.
  Client(std::shared_ptr<redis::Connection> connection, QueueOptions options);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  const QueueOptions& options() const;

  // Loads the Function library if this version is not there yet. Call after every (re)connect.
  asio::awaitable<Result<void>> load_library(Deadline deadline);

  // --- producers -------------------------------------------------------------------------------
  // kIdempotencyMismatch: the key was used with another body. kConflict: the id is taken.
  // kResourceExhausted: Redis is over its memory limit.
  asio::awaitable<Result<SubmitOutcome>> submit(const Submission& submission, Deadline deadline);
  // One Function call; the i-th result belongs to the i-th submission.
  asio::awaitable<Result<std::vector<Result<SubmitOutcome>>>> submit_many(std::span<const Submission> submissions,
                                                                          Deadline deadline);
  // kNotFound: no such job, or another tenant's (an empty tenant may cancel any).
  asio::awaitable<Result<CancelOutcome>> cancel(const std::string& job, const std::string& tenant, Deadline deadline);

  // --- readers ---------------------------------------------------------------------------------
  // An empty tenant sees every job. kNotFound otherwise as above.
  asio::awaitable<Result<JobRecord>> job(const std::string& id, const std::string& tenant, Deadline deadline);
  asio::awaitable<Result<JobPage>> list(const std::string& tenant, std::optional<job::State> state, int limit,
                                        const std::string& cursor, Deadline deadline);
  // Events of one job after the entry id `after` ("0": from the first), oldest first.
  asio::awaitable<Result<std::vector<Event>>> events(const std::string& job, const std::string& after, int limit,
                                                     Deadline deadline);
  // A record that is no worker's is left out, and logged once.
  asio::awaitable<Result<std::vector<WorkerInfo>>> workers(Deadline deadline);

  // --- scheduler (each call names the leader's epoch; kConflict once another leads) -----------------
  // Takes or keeps the leadership for `ttl_ms`; 0: another leads.
  asio::awaitable<Result<std::int64_t>> lead(const std::string& coordinator, std::int64_t ttl_ms, Deadline deadline);
  asio::awaitable<Result<void>> resign(const std::string& coordinator, std::int64_t epoch, Deadline deadline);
  // Waits up to `block` for new intake entries; entries not yet admitted or rejected are read again
  // after `rewind_intake()` (a new leader, a reconnect).
  asio::awaitable<Result<std::vector<IntakeEntry>>> read_intake(int limit, std::chrono::milliseconds block);
  void rewind_intake();
  asio::awaitable<Result<void>> admit(std::int64_t epoch, std::span<const Admission> admissions, Deadline deadline);
  // Admits and assigns in one: cheaper than the two, and one way less. The i-th is false if the i-th job is not queued
  // any more (canceled, expired, admitted before): nothing has happened to it then.
  asio::awaitable<Result<std::vector<bool>>> dispatch(std::int64_t epoch, std::span<const Dispatch> jobs,
                                                      Deadline deadline);
  asio::awaitable<Result<void>> reject(std::int64_t epoch, std::span<const Rejection> rejections, Deadline deadline);
  // Ready units → assigned, one message each to the worker's mailbox. True: done; false: no longer ready.
  asio::awaitable<Result<std::vector<bool>>> assign(std::int64_t epoch, const std::string& worker_owner,
                                                    std::span<const AssignRequest> units, Deadline deadline);
  // Assigned, not started → ready again, and a revoke to the mailbox. False: it had started or ended.
  asio::awaitable<Result<std::vector<bool>>> revoke(std::int64_t epoch, std::span<const Attempt> units,
                                                    Deadline deadline);
  // Lapsed leases → ready, delayed or dead (a crash each if it had started); delayed units that are due →
  // ready; jobs past their deadline → expired. Everything it did comes as events through the feed.
  // Returns how many units it touched.
  asio::awaitable<Result<int>> reap(std::int64_t epoch, int limit, Deadline deadline);
  // Everything that has not ended, to rebuild a scheduler from.
  asio::awaitable<Result<std::vector<UnitView>>> open_units(Deadline deadline);
  // Virtual times of the tenants (GPU-microseconds), kept so that a new leader goes on fairly; none: it is forgotten.
  asio::awaitable<Result<void>> store_virtual_times(std::int64_t epoch,
                                                    const std::map<std::string, std::optional<std::int64_t>>& times,
                                                    Deadline deadline);
  asio::awaitable<Result<std::map<std::string, std::int64_t>>> virtual_times(Deadline deadline);

  // --- workers ---------------------------------------------------------------------------------
  // The boot that was registered under the name before: its own, or another's that it displaces; empty: none.
  asio::awaitable<Result<std::string>> heartbeat(const WorkerInfo& info, Deadline deadline);
  asio::awaitable<Result<void>> deregister(const std::string& name, const std::string& boot, Deadline deadline);
  // Waits up to `block` for messages after `after` ("0": all that are still there).
  asio::awaitable<Result<std::vector<MailboxEntry>>> read_mailbox(const std::string& owner, const std::string& after,
                                                                  int limit, std::chrono::milliseconds block);
  asio::awaitable<Result<void>> acknowledge(const std::string& owner, std::span<const std::string> entry_ids,
                                            Deadline deadline);
  // Assigned → running; the attempt counts from here. kConflict: revoked, canceled or lapsed meanwhile.
  asio::awaitable<Result<void>> start(const Attempt& attempt, Deadline deadline);
  // One Function call; the i-th result belongs to the i-th attempt.
  asio::awaitable<Result<std::vector<Result<void>>>> start_many(std::span<const Attempt> attempts, Deadline deadline);
  asio::awaitable<Result<std::vector<RenewOutcome>>> renew(std::span<const Renewal> renewals, Deadline deadline);
  // Adds an event of the attempt ("preview"): fields as given. kConflict if stale.
  asio::awaitable<Result<void>> emit(const Attempt& attempt, const std::string& type,
                                     const std::map<std::string, std::string>& fields, Deadline deadline);
  // Creates the manifest if absent and completes the unit. Ok also if this very attempt had completed it.
  asio::awaitable<Result<void>> complete(const Completion& completion, Deadline deadline);
  asio::awaitable<Result<std::vector<Result<void>>>> complete_many(std::span<const Completion> completions,
                                                                   Deadline deadline);
  // Retry with back-off, or failed and dead-lettered when the attempts are used up.
  asio::awaitable<Result<void>> fail(const Failure& failure, Deadline deadline);
  // Back to ready, not counted as an attempt (drain).
  asio::awaitable<Result<void>> hand_back(std::span<const Attempt> attempts, Deadline deadline);
  // The unit stops at a cancel that was requested.
  asio::awaitable<Result<void>> canceled(const Attempt& attempt, Deadline deadline);

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;  // calls under way keep it: the owner may go first
};

// Follows what happens in a shard: lifecycle events (for the scheduler) and, if asked, steps and previews
// (for gateways). A gap (reconnect, overflow) is told, so that the follower reads its state anew.
class Feed {
 public:
  struct Batch {
    std::vector<Event> events;  // in order
    bool gap = false;           // something may have been missed before these
  };
  Feed(std::shared_ptr<redis::Connection> like, int shard, bool with_steps);
  ~Feed();
  // Waits up to `block`; an empty batch is a time-out. kUnavailable while Redis is away.
  asio::awaitable<Result<Batch>> next(std::chrono::milliseconds block);

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;  // calls under way keep it: the owner may go first
};

}  // namespace ditfleet::queue
