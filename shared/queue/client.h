// The client of one shard's queue. Each state transition is a call, which runs one or more Functions of
// functions/*.lua. Every Function is atomic and uses Redis' clock.
//
// Not thread-safe: call every function on the connection's executor. The calls do not block. Redis runs outstanding
// calls in the order in which they were made.
// Every call can return these errors. kUnavailable: not connected, or the connection was lost; the transition may have
// happened, and repeating it is safe. kDeadlineExceeded. kConflict: outdated epoch or nonce, or wrong state.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <functional>
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

namespace ditfleet::config {
struct Settings;
}

namespace ditfleet::queue {

namespace asio = boost::asio;

// Limits of a tenant's open jobs; 0: none. If the shard has max_queued queued units, the tenant may still submit while
// it has at most `share` units.
struct Quota {
  std::int64_t units = 0, bytes = 0, share = 0, max_queued = 0;
  std::string packed() const;  // for the Functions
};

struct Mended {
  std::int64_t put_back = 0, unreadable = 0;  // open units
};

struct TenantUse {
  std::int64_t units = 0, bytes = 0;         // of open jobs; a job's spec counts as whole KiB
  std::int64_t inputs = 0, input_bytes = 0;  // stored images
};
// Limits of a tenant's images.
struct InputQuota {
  std::int64_t images = 0, bytes = 0;
};

struct QueueOptions {
  int shard = 0;
  std::int64_t lease_ms = 5000;           // of assigned and running units
  std::int64_t retention_ms = 3'600'000;  // of ended jobs and their events
  std::int64_t idempotency_ms = 86'400'000;
  std::int64_t max_age_ms = 0;          // of open jobs; 0: no limit
  int max_attempts = 3;                 // errors per unit
  int wait_replicas = 0;                // that must have a new job before submit() succeeds
  int max_crashes = 2;                  // workers per unit that are lost after its start and do not come back
  int max_lapses = 5;                   // workers per unit that are lost
  std::int64_t retry_backoff_ms = 500;  // before the first retry; doubles with each retry, with jitter
  std::int64_t retry_backoff_max_ms = 30'000;
  std::int64_t history_ms = 0, history_jobs = 0;  // age and number of the jobs in the history; either 0: no history
  std::function<Quota(const std::string& tenant)> quota = {};  // unset: none
};

// The options of section `queue`. Scheduler and workers use the same, so that they agree about retries.
QueueOptions queue_options(const config::Settings& settings);

enum class CancelOutcome { kCanceled, kRequested, kAlreadyEnded };
enum class PauseOutcome { kDone, kAlreadyEnded, kCanceling };

class Client {
 public:
  // `connection` is used for all commands except blocking reads, which use separate connections to the same endpoint.
  Client(std::shared_ptr<redis::Connection> connection, QueueOptions options);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  const QueueOptions& options() const;

  // Loads the Function library unless Redis has this or a newer build. Call it after every (re)connect.
  asio::awaitable<Result<void>> load_library(Deadline deadline);

  // --- producers -------------------------------------------------------------------------------
  // kIdempotencyMismatch: the idempotency key was used with another spec. kConflict: another job has the id.
  // kResourceExhausted: Redis is over its memory limit, or the tenant over a quota. kPayloadTooLarge: over a quota that
  // the job alone exceeds.
  asio::awaitable<Result<SubmitOutcome>> submit(const Submission& submission, Deadline deadline);
  // kNotFound: there is no such job, or it belongs to another tenant. An empty tenant may cancel any job.
  asio::awaitable<Result<CancelOutcome>> cancel(const std::string& job, const std::string& tenant, Deadline deadline);
  // Units that run stop at their next step, and no unit is assigned until resume(). Both may be repeated. A unit whose
  // worker is of a build without pauses runs to its end. Errors as cancel().
  asio::awaitable<Result<PauseOutcome>> pause(const std::string& job, const std::string& tenant, Deadline deadline);
  asio::awaitable<Result<PauseOutcome>> resume(const std::string& job, const std::string& tenant, Deadline deadline);
  // Removes the record of an ended job and its results in Redis before the retention has passed. The caller has checked
  // the tenant. False: the job is open or unknown.
  asio::awaitable<Result<bool>> forget(const std::string& job, Deadline deadline);

  // --- readers ---------------------------------------------------------------------------------
  // kNotFound: there is no such job, or it belongs to another tenant. An empty tenant may read any job.
  asio::awaitable<Result<JobRecord>> job(const std::string& id, const std::string& tenant, Deadline deadline);
  // The cursor "CREATED_MS:ID" begins after that job. Newest first, unless `oldest_first`. Looks at 10,000 jobs at
  // most. `keep`: chooses jobs by their records, which have no spec yet; empty: all.
  asio::awaitable<Result<JobPage>> list(const std::string& tenant, std::optional<job::State> state, int limit,
                                        const std::string& cursor, Deadline deadline, bool oldest_first = false,
                                        std::function<bool(const JobRecord&)> keep = {});
  // Returns the events of a job after the event id `after`, oldest first. "0" returns all events. Each call walks from
  // the newest event back to `after`, in calls to Redis of 500 events.
  asio::awaitable<Result<std::vector<Event>>> events(const std::string& job, const std::string& after, int limit,
                                                     Deadline deadline);
  // Returns one event of a job. kNotFound: the job has no such event, or it was trimmed.
  asio::awaitable<Result<Event>> event(const std::string& job, const std::string& id, Deadline deadline);
  // Returns all workers with one call to Redis. Skips invalid records and logs each of them once. `with_tenants` also
  // fills in WorkerInfo::tenants, which costs a lookup per unit.
  asio::awaitable<Result<std::vector<WorkerInfo>>> workers(Deadline deadline, bool with_tenants = false);
  asio::awaitable<Result<Depth>> depth(Deadline deadline);
  // Empty while no coordinator leads.
  asio::awaitable<Result<std::optional<FleetForecast>>> forecast(Deadline deadline);
  // What the leader expects of the jobs that are next; empty while no coordinator leads.
  asio::awaitable<Result<std::map<std::string, JobOutlook>>> outlook(Deadline deadline);
  // Of tenants with open jobs or images.
  asio::awaitable<Result<std::map<std::string, TenantUse>>> use(Deadline deadline);

  // Returns ended jobs in the order in which they were recorded, from the first after the cursor or the time in
  // milliseconds `after`. kInvalidArgument: it is neither.
  asio::awaitable<Result<HistoryPage>> history(const std::string& after, int limit, Deadline deadline);

  // --- images that clients send (inputs) ---------------------------------------------------------
  // These calls decide who may use an image and how long it is stored. Its bytes are in the result store, by their
  // SHA-256. An image is kept for `keep_ms`, and longer while an open job of its tenant names it.
  // Counts an image, or extends its life. True: the tenant did not have it. `bytes` 0: only extends.
  // kNotFound: the tenant does not have it. kResourceExhausted: over the quota.
  asio::awaitable<Result<bool>> keep_input(const std::string& tenant, const std::string& sha256, std::int64_t bytes,
                                           std::int64_t keep_ms, InputQuota quota, Deadline deadline);
  // True: no other tenant has the image, so that the caller removes its bytes.
  // kNotFound: the tenant does not have it. kConflict: an open job names it.
  asio::awaitable<Result<bool>> remove_input(const std::string& tenant, const std::string& sha256, Deadline deadline);
  // Drops images whose time is over. Returns those that no tenant has any more: the caller removes their bytes.
  asio::awaitable<Result<std::vector<std::string>>> expire_inputs(Deadline deadline);
  // A tenant's images with their bytes.
  asio::awaitable<Result<std::map<std::string, std::int64_t>>> inputs(const std::string& tenant, Deadline deadline);

  // --- administrators --------------------------------------------------------------------------
  // Replaces the worker's desired state, which lasts for a week after the worker's last heartbeat. A worker that has
  // received a unit before reads it at once, any other with its next heartbeat.
  asio::awaitable<Result<void>> set_desired(const WorkerInfo& worker, Desired desired, Deadline deadline);

  // --- scheduler (kConflict: another coordinator leads) ------------------------------------------
  // Acquires or renews the leadership for `ttl_ms`. Returns the epoch, or 0 if another coordinator leads.
  asio::awaitable<Result<std::int64_t>> lead(const std::string& coordinator, std::int64_t ttl_ms, Deadline deadline);
  asio::awaitable<Result<void>> resign(const std::string& coordinator, std::int64_t epoch, Deadline deadline);
  // Waits up to `block` for new intake entries. After rewind_intake(), it again returns all entries that are neither
  // admitted nor rejected. Call rewind_intake() after becoming the leader and after a reconnect.
  asio::awaitable<Result<std::vector<IntakeEntry>>> read_intake(int limit, std::chrono::milliseconds block);
  void rewind_intake();
  asio::awaitable<Result<void>> admit(std::int64_t epoch, std::span<const Admission> admissions, Deadline deadline);
  asio::awaitable<Result<void>> reject(std::int64_t epoch, std::span<const Rejection> rejections, Deadline deadline);
  // Assigns ready units and writes them to the worker's mailbox. Element i is false if unit i is not ready.
  asio::awaitable<Result<std::vector<bool>>> assign(std::int64_t epoch, const std::string& worker_owner,
                                                    std::span<const AssignRequest> units, Deadline deadline);
  // Makes assigned units ready again and writes revokes to the mailboxes. Element i is false if unit i has started or
  // ended. `lost`: the workers are gone, so that their leases expire at once instead, which reap() counts.
  asio::awaitable<Result<std::vector<bool>>> revoke(std::int64_t epoch, std::span<const Attempt> units,
                                                    Deadline deadline, bool lost = false);
  // Makes units ready whose lease has expired or whose retry is due. Fails units whose leases expired too often.
  // Expires jobs that are past their deadline or too old, and forgets old ended jobs. Every change is an event. Returns
  // the number of changed units and jobs. Leases do not expire for the hold time after Redis was away. `hold`: Redis'
  // clock is doubtful; only makes units ready whose retry is due.
  asio::awaitable<Result<int>> reap(std::int64_t epoch, int limit, Deadline deadline, bool hold = false);
  // A lease, and the longest time in which a worker reconnects. hold_leases() begins it: call it when a term begins.
  std::chrono::milliseconds hold_time() const;
  void hold_leases();
  asio::awaitable<Result<ClockMark>> clock_mark(Deadline deadline);
  asio::awaitable<Result<void>> set_clock_mark(const ClockMark& mark, Deadline deadline);
  // After Redis' clock was set back to `now_ms`: moves retries and ends of leases, at most 1,000 each, to the latest
  // times that are possible.
  asio::awaitable<void> bring_forward(std::int64_t now_ms, Deadline deadline);
  // Returns every unit that has not ended, to restore the scheduler's state. Reads pages, each with the time limit.
  // The units are not of one moment: a unit that becomes open or ends meanwhile may be missing, and a returned unit may
  // have changed since. Follow the feed from before the call on. kUnavailable: the connection was lost meanwhile.
  asio::awaitable<Result<std::vector<UnitView>>> open_units(std::chrono::milliseconds page_limit);
  // Puts open units back into the set of their state, where a Redis that lost data, or another program, left one
  // without. Counts those and the units whose records cannot be read. Reads pages, each with the time limit.
  asio::awaitable<Result<Mended>> mend(std::int64_t epoch, std::chrono::milliseconds page_limit);
  // Stores the tenants' virtual times in GPU-microseconds for the next leader. nullopt removes a tenant.
  asio::awaitable<Result<void>> store_virtual_times(std::int64_t epoch,
                                                    const std::map<std::string, std::optional<std::int64_t>>& times,
                                                    Deadline deadline);
  asio::awaitable<Result<std::map<std::string, std::int64_t>>> virtual_times(Deadline deadline);
  // Appends ended jobs to the history and removes those that are too old at `now_ms` or too many. May be repeated after
  // an error, but then records jobs twice.
  asio::awaitable<Result<void>> append_history(std::span<const HistoryJob> jobs, std::int64_t now_ms,
                                               Deadline deadline);
  // Replaces the forecast, which expires after 5 s.
  asio::awaitable<Result<void>> publish(const FleetForecast& forecast, Deadline deadline);
  // Returns when to publish it again, so that it takes at most 4 KiB a second.
  asio::awaitable<Result<std::chrono::milliseconds>> publish(const std::map<std::string, JobOutlook>& outlook,
                                                             Deadline deadline);

  // --- workers ---------------------------------------------------------------------------------
  // Returns the run id that was registered under this name before, possibly this run's own; empty if there was none.
  asio::awaitable<Result<std::string>> heartbeat(const WorkerInfo& info, Deadline deadline);
  // The desired state of this run.
  asio::awaitable<Result<Desired>> desired(const std::string& name, const std::string& boot, Deadline deadline);
  asio::awaitable<Result<void>> deregister(const std::string& name, const std::string& boot, Deadline deadline);
  // Waits up to `block` for messages after the entry id `after`. "0" returns all messages. Deletes and logs invalid
  // entries.
  asio::awaitable<Result<std::vector<MailboxEntry>>> read_mailbox(const std::string& owner, const std::string& after,
                                                                  int limit, std::chrono::milliseconds block);
  asio::awaitable<Result<void>> acknowledge(const std::string& owner, std::span<const std::string> entry_ids,
                                            Deadline deadline);
  // Marks the unit as running. kConflict: the unit was revoked or canceled, or its lease has expired.
  asio::awaitable<Result<void>> start(const Attempt& attempt, Deadline deadline);
  asio::awaitable<Result<std::vector<RenewOutcome>>> renew(std::span<const Renewal> renewals, Deadline deadline);
  // Adds an event of this type, such as "preview". kConflict: the attempt is outdated.
  asio::awaitable<Result<void>> emit(const Attempt& attempt, const std::string& type,
                                     const std::map<std::string, std::string>& fields, Deadline deadline);
  // Stores the manifest and completes the unit. Succeeds if the same attempt has already completed the unit.
  asio::awaitable<Result<void>> complete(const Completion& completion, Deadline deadline);
  // Schedules a retry of the unit after a back-off. If no attempts are left, fails the unit and writes a dead letter.
  asio::awaitable<Result<void>> fail(const Failure& failure, Deadline deadline);
  // Makes units ready again without counting an attempt. For workers that drain.
  asio::awaitable<Result<void>> hand_back(std::span<const Attempt> attempts, Deadline deadline);
  // Sets a running unit aside until its job is resumed. False: it is not held, or was asked to stop; hand it back.
  asio::awaitable<Result<bool>> hold(const Attempt& attempt, Deadline deadline);
  // Confirms that the worker has stopped a canceled unit.
  asio::awaitable<Result<void>> canceled(const Attempt& attempt, Deadline deadline);
  // A text that the next attempt at the unit reads: where its checkpoint is. It expires with the job's results
  // (QueueOptions::retention_ms). kConflict: the unit does not run under this nonce, and nothing is stored.
  asio::awaitable<Result<void>> store_checkpoint(const Attempt& attempt, const std::string& text, Deadline deadline);
  // For a job that does not exist yet.
  asio::awaitable<Result<void>> give_checkpoint(const UnitRef& unit, const std::string& text, Deadline deadline);
  asio::awaitable<Result<std::string>> checkpoint(const UnitRef& unit, Deadline deadline);  // empty: none
  asio::awaitable<Result<bool>> is_open(const UnitRef& unit, Deadline deadline);  // false: it has ended, or its job has
  asio::awaitable<Result<void>> drop_checkpoint(const UnitRef& unit, Deadline deadline);
  // Extends the life of the texts of all units that are paused, and returns them.
  asio::awaitable<Result<std::vector<std::string>>> keep_checkpoints(Deadline deadline);

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;  // outstanding calls keep it alive
};

// Follows the events of a shard: state changes and, with `with_steps`, also steps and previews. A reconnect or overflow
// causes a gap, after which the caller must read its state again.
class Feed {
 public:
  struct Batch {
    std::vector<Event> events;  // in order
    bool gap = false;           // events before `events` may be missing
  };
  // Subscribes on a connection of its own, to the same endpoint as `like`. Through `like` it publishes a probe to
  // itself every `probe_every`. If two in a row do not come back, it reconnects, which is a gap.
  Feed(std::shared_ptr<redis::Connection> like, int shard, bool with_steps,
       std::chrono::milliseconds probe_every = std::chrono::seconds(3));
  ~Feed();
  // False while it is not subscribed, or the latest probe has not come back.
  bool hears() const;
  // Waits up to `block` for events; an empty batch means that none arrived. kUnavailable: Redis is down.
  asio::awaitable<Result<Batch>> next(std::chrono::milliseconds block);

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;  // outstanding calls keep it alive
};

}  // namespace ditfleet::queue
