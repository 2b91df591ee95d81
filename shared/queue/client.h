// The queue of one shard: every state transition as a typed call. Each is one Function of functions/*.lua, atomic and
// timed by Redis' clock.
//
// Threads: all calls from the connection's executor (one thread or a strand). Nothing blocks it. Calls that are
// outstanding at the same time run in the order in which they were made.
// Errors of every call: kUnavailable (not connected, connection lost; the transition may have happened, and every
// transition is safe to repeat), kDeadlineExceeded, kConflict (stale epoch or nonce, wrong state).
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
  std::int64_t retention_ms = 3'600'000;  // of ended jobs and their events
  std::int64_t idempotency_ms = 86'400'000;
  int max_attempts = 3;                 // errors per unit
  int max_crashes = 2;                  // workers lost per unit
  std::int64_t retry_backoff_ms = 500;  // doubled with each retry, with jitter
  std::int64_t retry_backoff_max_ms = 30'000;
};

enum class CancelOutcome { kCanceled, kRequested, kAlreadyEnded };

class Client {
 public:
  // `connection` carries all commands but blocking reads, which use connections of their own to the same endpoint.
  Client(std::shared_ptr<redis::Connection> connection, QueueOptions options);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  const QueueOptions& options() const;

  // Loads the Function library unless Redis has this version. Call it after every (re)connect.
  asio::awaitable<Result<void>> load_library(Deadline deadline);

  // --- producers -------------------------------------------------------------------------------
  // kIdempotencyMismatch: the key was used with another body. kConflict: the id is taken.
  // kResourceExhausted: Redis is over its memory limit.
  asio::awaitable<Result<SubmitOutcome>> submit(const Submission& submission, Deadline deadline);
  // kNotFound: no such job, or another tenant's (an empty tenant may cancel any).
  asio::awaitable<Result<CancelOutcome>> cancel(const std::string& job, const std::string& tenant, Deadline deadline);

  // --- readers ---------------------------------------------------------------------------------
  // kNotFound: no such job, or another tenant's (an empty tenant sees every job).
  asio::awaitable<Result<JobRecord>> job(const std::string& id, const std::string& tenant, Deadline deadline);
  asio::awaitable<Result<JobPage>> list(const std::string& tenant, std::optional<job::State> state, int limit,
                                        const std::string& cursor, Deadline deadline);
  // Events of a job after the event id `after` ("0": from the first), oldest first.
  asio::awaitable<Result<std::vector<Event>>> events(const std::string& job, const std::string& after, int limit,
                                                     Deadline deadline);
  // One call to Redis. Ignores records that are not a worker's and logs each once. `with_tenants` fills in
  // WorkerInfo::tenants, which costs a look-up per unit.
  asio::awaitable<Result<std::vector<WorkerInfo>>> workers(Deadline deadline, bool with_tenants = false);
  asio::awaitable<Result<Depth>> depth(Deadline deadline);

  // --- scheduler (kConflict: another coordinator leads) ------------------------------------------
  // Takes or keeps the leadership for `ttl_ms` and returns its epoch; 0: another coordinator leads.
  asio::awaitable<Result<std::int64_t>> lead(const std::string& coordinator, std::int64_t ttl_ms, Deadline deadline);
  asio::awaitable<Result<void>> resign(const std::string& coordinator, std::int64_t epoch, Deadline deadline);
  // Waits up to `block` for new intake entries. After rewind_intake() (a new leader, a reconnect) it reads all entries
  // again that are neither admitted nor rejected.
  asio::awaitable<Result<std::vector<IntakeEntry>>> read_intake(int limit, std::chrono::milliseconds block);
  void rewind_intake();
  asio::awaitable<Result<void>> admit(std::int64_t epoch, std::span<const Admission> admissions, Deadline deadline);
  asio::awaitable<Result<void>> reject(std::int64_t epoch, std::span<const Rejection> rejections, Deadline deadline);
  // Assigns ready units and writes them to the worker's mailbox. The i-th is false if the i-th unit is not ready.
  asio::awaitable<Result<std::vector<bool>>> assign(std::int64_t epoch, const std::string& worker_owner,
                                                    std::span<const AssignRequest> units, Deadline deadline);
  // Makes assigned units ready again and writes revokes to the mailboxes. The i-th is false if the i-th unit has
  // started or ended.
  asio::awaitable<Result<std::vector<bool>>> revoke(std::int64_t epoch, std::span<const Attempt> units,
                                                    Deadline deadline);
  // Returns units whose lease lapsed to the queue, or fails them after too many crashes; readies delayed units that are
  // due; expires jobs past their deadline. The feed reports each of these. Returns how many units it changed.
  asio::awaitable<Result<int>> reap(std::int64_t epoch, int limit, Deadline deadline);
  // Every unit that has not ended, to rebuild a scheduler from.
  asio::awaitable<Result<std::vector<UnitView>>> open_units(Deadline deadline);
  // Virtual times of the tenants in GPU-microseconds, for the next leader. nullopt removes a tenant.
  asio::awaitable<Result<void>> store_virtual_times(std::int64_t epoch,
                                                    const std::map<std::string, std::optional<std::int64_t>>& times,
                                                    Deadline deadline);
  asio::awaitable<Result<std::map<std::string, std::int64_t>>> virtual_times(Deadline deadline);

  // --- workers ---------------------------------------------------------------------------------
  // Returns the boot that was registered under the name before, which may be its own; empty: none.
  asio::awaitable<Result<std::string>> heartbeat(const WorkerInfo& info, Deadline deadline);
  asio::awaitable<Result<void>> deregister(const std::string& name, const std::string& boot, Deadline deadline);
  // Waits up to `block` for messages after the entry id `after` ("0": all).
  asio::awaitable<Result<std::vector<MailboxEntry>>> read_mailbox(const std::string& owner, const std::string& after,
                                                                  int limit, std::chrono::milliseconds block);
  asio::awaitable<Result<void>> acknowledge(const std::string& owner, std::span<const std::string> entry_ids,
                                            Deadline deadline);
  // Marks the unit as running, which counts the attempt. kConflict: it was revoked or canceled, or its lease lapsed.
  asio::awaitable<Result<void>> start(const Attempt& attempt, Deadline deadline);
  asio::awaitable<Result<std::vector<RenewOutcome>>> renew(std::span<const Renewal> renewals, Deadline deadline);
  // Adds an event ("preview") with these fields. kConflict: stale attempt.
  asio::awaitable<Result<void>> emit(const Attempt& attempt, const std::string& type,
                                     const std::map<std::string, std::string>& fields, Deadline deadline);
  // Stores the manifest and completes the unit. Ok also if the same attempt has completed it before.
  asio::awaitable<Result<void>> complete(const Completion& completion, Deadline deadline);
  // Retries the unit after a back-off, or fails it and writes a dead letter when its attempts are used up.
  asio::awaitable<Result<void>> fail(const Failure& failure, Deadline deadline);
  // Makes units ready again without counting an attempt (drain).
  asio::awaitable<Result<void>> hand_back(std::span<const Attempt> attempts, Deadline deadline);
  // Confirms that the unit stopped after a requested cancel.
  asio::awaitable<Result<void>> canceled(const Attempt& attempt, Deadline deadline);

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;  // outstanding calls keep it alive
};

// Follows the events of a shard: lifecycle events, and steps and previews if asked. After a gap (reconnect, overflow)
// the follower must read its state again.
class Feed {
 public:
  struct Batch {
    std::vector<Event> events;  // in order
    bool gap = false;           // events before these may be missing
  };
  Feed(std::shared_ptr<redis::Connection> like, int shard, bool with_steps);
  ~Feed();
  // Waits up to `block`; an empty batch is a time-out. kUnavailable while Redis is down.
  asio::awaitable<Result<Batch>> next(std::chrono::milliseconds block);

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;  // outstanding calls keep it alive
};

}  // namespace ditfleet::queue
