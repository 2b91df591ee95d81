// The values that cross the queue's API (client.h). Times are milliseconds of Redis' clock since the epoch
// unless a name says otherwise.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "shared/core/error.h"
#include "shared/job/state.h"

namespace ditfleet::queue {

struct UnitRef {
  std::string job;
  int unit = 0;
  auto operator<=>(const UnitRef&) const = default;
};

// The right to act on a unit: who was assigned it, under which nonce. Stale ones are refused.
struct Attempt {
  UnitRef ref;
  std::string nonce;
};

struct Submission {
  std::string id;  // empty: a fresh ULID
  std::string tenant = "default";
  std::string spec;                 // JSON; opaque to Redis
  std::string idempotency_key;      // empty: none
  std::string traceparent;          // W3C; empty: none
  std::int64_t deadline_ms = 0;     // absolute; 0: none
  std::int64_t deadline_in_ms = 0;  // instead: from now on, by Redis' clock and not by this host's; 0: none
};

struct SubmitOutcome {
  std::string id;
  bool existed = false;  // the idempotency key had been used with this very body
};

// An intake entry as the scheduler reads it. Entries of `submit` name a stored job; entries of a plain
// XADD carry the spec themselves and have id "x-<entry>" unless they chose one.
struct IntakeEntry {
  std::string entry_id;
  std::string id;
  std::string tenant = "default";
  std::string spec;
  std::string idempotency_key;
  std::string traceparent;
  std::int64_t created_ms = 0;
  std::int64_t deadline_ms = 0;
  bool raw = false;     // came by XADD
  std::string problem;  // not empty: the entry itself is bad (no spec field, odd id …) and must be rejected
};

struct Admission {
  std::string entry_id, id;
  int units = 1;
  std::string spec;  // complete
  std::string class_key;
  int steps = 0;                           // denoising steps of a unit
  std::vector<std::string> adapters = {};  // that its units need
  std::int64_t cost_us = 0;                // predicted, of one unit
  int priority = 0;
  std::int64_t deadline_ms = 0;
  // Only of raw entries, which `admit` turns into jobs:
  bool raw = false;
  std::string tenant, idempotency_key, traceparent;
};

struct Rejection {
  std::string entry_id, id;
  Error error;
  bool raw = false;
  std::string tenant, spec, traceparent;
};

// A ready, delayed, assigned or running unit as the scheduler needs it to decide and to rebuild itself.
struct UnitView {
  UnitRef ref;
  job::State state = job::State::kReady;
  std::string tenant, class_key, model;
  int steps = 0;                      // denoising steps; 0: not known
  std::vector<std::string> adapters;  // that it needs
  std::int64_t cost_us = 0, created_ms = 0, ready_ms = 0, deadline_ms = 0, lease_until_ms = 0, not_before_ms = 0;
  int priority = 0, attempt = 0, crashes = 0;
  std::string owner, nonce;  // while assigned or running; owner is "<worker>:<boot>"
};

struct AssignRequest {
  UnitRef ref;
  std::string nonce;
  std::string reason;  // why this worker, for the `assigned` event and `ditfleet explain`; short
  // Adapters that the worker does best to drop if it needs room for this unit's, in this order.
  std::vector<std::string> drop_from_host = {}, drop_from_slots = {};
};

// An admission whose units have workers already, at least one of them; the others become ready.
struct Dispatch {
  struct Placement {
    std::string owner;
    AssignRequest unit;  // of the admission's job
  };
  Admission admission;  // not of a raw entry
  std::vector<Placement> placements;
};

// One message in a worker's mailbox.
struct MailboxEntry {
  enum class Kind { kAssign, kRevoke, kCancel };
  std::string entry_id;
  Kind kind = Kind::kAssign;
  UnitRef ref;
  std::string nonce;
  // Of kAssign:
  std::string spec, class_key, tenant, traceparent;
  int attempt = 0;
  std::int64_t deadline_ms = 0;
  std::int64_t created_ms = 0, assigned_ms = 0;  // Redis' time: of the job, and of this message; 0: not known
  std::vector<std::string> drop_from_host, drop_from_slots;  // as in AssignRequest
};

struct Renewal {
  Attempt attempt;
  int step = 0, total_steps = 0;
};

enum class RenewOutcome { kOk, kLost, kCancelRequested };

// What a finished unit leaves behind; `manifest` is the result store's JSON (results/store.h).
struct Completion {
  Attempt attempt;
  std::string manifest;
  std::map<std::string, std::int64_t> phases_us;  // "text", "denoise", "vae", "encode", "store", …
  std::vector<std::string> warnings;
};

struct Failure {
  Attempt attempt;
  Error error;
  bool retryable = false;
  bool crash = false;  // the process or device died, as opposed to an error that was caught
};

struct Event {
  std::string id;  // the event stream's entry id: the SSE id
  std::string job;
  std::string type;  // queued ready assigned started step preview succeeded failed canceled expired rejected …
  int unit = -1;     // -1: of the job as a whole
  std::int64_t at_ms = 0;
  std::map<std::string, std::string> fields;  // step, total, worker, nonce, attempt, code, message, preview key …
};

struct UnitRecord {
  int unit = 0;
  job::State state = job::State::kQueued;
  int attempt = 0, step = 0, total_steps = 0;
  std::string owner, nonce, manifest;
  std::optional<Error> error;
  std::map<std::string, std::int64_t> phases_us;
  std::int64_t assigned_ms = 0, started_ms = 0, ended_ms = 0;
};

struct JobRecord {
  std::string id, tenant, spec, class_key, traceparent;
  job::State state = job::State::kQueued;
  std::int64_t created_ms = 0, ready_ms = 0, ended_ms = 0, deadline_ms = 0, cost_us = 0;
  int units = 1;
  std::optional<Error> error;
  std::vector<std::string> warnings;
  std::vector<UnitRecord> unit_records;  // empty until admitted
};

struct JobPage {
  std::vector<JobRecord> jobs;  // newest first, without unit records
  std::string next_cursor;      // empty: the last page
};

// Heartbeat of one worker incarnation; how the registry, the router and GET /v1/workers see it.
struct WorkerInfo {
  std::string name, boot;
  std::string host;
  int pid = 0;
  std::string state = "starting";  // starting ready draining
  std::string device, device_name, precision;
  std::vector<std::string> models, warm_classes;
  // LoRA adapters. A worker without slots takes no unit that needs one.
  int adapter_slots = 0;
  std::vector<std::string> adapters;          // in slots: a unit that needs only these waits for nothing
  std::vector<std::string> host_adapters;     // in host memory, a copy away from a slot; may name those in slots too
  std::int64_t host_adapter_bytes = 0;        // room for adapters in host memory in all
  std::int64_t adapter_load_bytes_per_s = 0;  // from their source, as measured; 0: not yet
  std::int64_t adapter_swap_us = 0;           // from host memory to a slot, as measured; 0: not yet
  int capacity = 2;                           // units it takes at once, the running one included
  std::int64_t heartbeat_ms = 0;              // set by Redis
  std::int64_t unheard_ms = 0;                // since then, by Redis' clock, when it was read
  std::int64_t started_ms = 0;
  std::string version;
  std::vector<UnitRef> units;  // what it holds now
  std::string owner() const { return name + ":" + boot; }
};

}  // namespace ditfleet::queue
