// The types in the queue's API (client.h). Times are in milliseconds since 1970 by Redis' clock, unless the name has
// another unit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shared/core/error.h"
#include "shared/core/text.h"
#include "shared/job/state.h"

namespace ditfleet::queue {

struct UnitRef {
  std::string job;
  int unit = 0;
  auto operator<=>(const UnitRef&) const = default;
};

// An attempt to run a unit. Redis rejects calls with a nonce that is not the one of the latest assignment.
struct Attempt {
  UnitRef ref;
  std::string nonce;
};

struct Submission {
  std::string id;  // empty: submit() creates a ULID
  std::string tenant = "default";
  std::string spec;                 // JSON, which Redis does not parse
  int units = 1;                    // images
  std::string idempotency_key;      // empty: none
  std::string traceparent;          // W3C; empty: none
  std::int64_t deadline_ms = 0;     // absolute; 0: none
  std::int64_t deadline_in_ms = 0;  // alternative to deadline_ms: time from now; 0: none
};

struct SubmitOutcome {
  std::string id;
  bool existed = false;  // the idempotency key or the id was already used with the same spec
};

// An intake entry as the scheduler reads it. A job from XADD has the id "x-<entry id>" unless the client set `id`.
struct IntakeEntry {
  std::string entry_id;
  std::string id;
  std::string tenant = "default";
  std::string spec;
  std::string idempotency_key;
  std::string traceparent;
  std::int64_t created_ms = 0;
  std::int64_t deadline_ms = 0;
  bool raw = false;     // from XADD, not from submit()
  std::string problem;  // why the entry must be rejected, such as an invalid id; empty: the entry is valid
};

struct Admission {
  std::string entry_id, id;
  int units = 1;
  std::string spec;  // complete
  std::string class_key;
  int steps = 0;                           // denoising steps of a unit
  std::vector<std::string> adapters = {};  // digests of the adapters that its units need
  std::int64_t cost_us = 0;                // predicted, per unit
  int priority = 0;
  std::int64_t deadline_ms = 0;
  // Of raw entries only:
  bool raw = false;
  std::string tenant, idempotency_key, traceparent;
};

struct Rejection {
  std::string entry_id, id;
  Error error;
  bool raw = false;
  std::string tenant, spec, traceparent;
};

// A unit of a paused job is delayed until then: 2100-01-01.
inline constexpr std::int64_t kPausedUntilMs = 4'102'444'800'000;

// A unit that has not ended, for the scheduler.
struct UnitView {
  UnitRef ref;
  job::State state = job::State::kReady;  // ready, assigned or running
  std::string tenant, class_key, model;
  int steps = 0;                      // denoising steps; 0: unknown
  std::vector<std::string> adapters;  // digests of the adapters that the unit needs
  std::int64_t cost_us = 0, created_ms = 0, ready_ms = 0, deadline_ms = 0, not_before_ms = 0;
  int priority = 0, attempt = 0;
  int lapses = 0;                      // how often it was lost with its worker
  std::vector<std::string> failed_on;  // names of workers on which it failed, or was lost after its start
  std::string owner, nonce;            // while assigned or running; owner is "<worker>:<run id>"
};

struct AssignRequest {
  UnitRef ref;
  std::string nonce;
  std::string reason;  // why this worker was chosen, for the `assigned` event and `ditfleet explain`
  // Adapters to evict, in this order, if the worker needs memory or slots for the adapters of this unit.
  std::vector<std::string> drop_from_host = {}, drop_from_slots = {};
};

// One message in a worker's mailbox.
struct MailboxEntry {
  // kDesired: the worker's desired state has changed. It has no unit.
  enum class Kind { kAssign, kRevoke, kPause, kCancel, kDesired };
  std::string entry_id;
  Kind kind = Kind::kAssign;
  UnitRef ref;
  std::string nonce;
  // Of kAssign:
  std::string spec, class_key, tenant, traceparent;
  std::string reason;  // as in AssignRequest
  int attempt = 0;
  std::int64_t deadline_ms = 0;
  std::int64_t created_ms = 0, assigned_ms = 0;              // times of the job and of this message; 0: unknown
  std::vector<std::string> drop_from_host, drop_from_slots;  // as in AssignRequest
};

struct Renewal {
  Attempt attempt;
  int step = 0, total_steps = 0;
};

enum class RenewOutcome { kOk, kLost, kCancelRequested };

// The outcome of a successful unit. `manifest` is the JSON of a results::Manifest.
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
  bool crash = false;  // the process or the device failed
};

struct Event {
  std::string id;  // id of its entry in the stream, also used as the SSE id
  std::string job;
  std::string type;  // queued ready assigned started step preview succeeded failed canceled expired rejected …
  int unit = -1;     // -1: the event concerns the job
  std::int64_t at_ms = 0;
  std::map<std::string, std::string> fields;  // step, total, worker, nonce, attempt, code, message, preview key …

  // Empty if there is no such field.
  std::string field(const char* name) const {
    const auto it = fields.find(name);
    return it == fields.end() ? std::string() : it->second;
  }
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

// How much work a shard has.
struct Depth {
  std::size_t queued_jobs = 0;    // jobs in the intake
  std::size_t admitted_jobs = 0;  // admitted jobs that have not ended
  std::size_t ready_units = 0;    // units that wait for a worker, without those in back-off
  std::int64_t time_us = 0;       // time of this reading by Redis' clock, in microseconds
};

// What a leader thinks of Redis' clock.
struct ClockMark {
  std::int64_t seen_ms = 0;  // the latest time that was right; 0: none
  std::string held;          // why what time would end is held; empty: it is not
};

struct JobPage {
  std::vector<JobRecord> jobs;  // without unit records
  std::string next_cursor;      // empty: the last page
};

// An ended job in the history, which serves statistics: a change of the leader may omit or repeat some jobs, and
// jobs that waited in the intake before it led count from their admission.
struct HistoryJob {
  std::int64_t created_ms = 0, total_ms = 0;  // total_ms: from its creation to its end
  std::int64_t run_ms = 0;                    // of the unit that ended last; 0: unknown
  std::string tenant, class_key, worker;
  std::string adapter;  // first 12 digits of the digest of its first adapter
  job::State state = job::State::kSucceeded;
  int steps = 0, units = 1, attempts = 0;
};

struct HistoryPage {
  std::vector<HistoryJob> jobs;  // oldest first
  std::string next_cursor;       // empty: the last page
};

// The parts of a list that stored records and events separate by commas.
inline std::vector<std::string> split_list(std::string_view packed) {
  const auto parts = split(packed, ',');
  return {parts.begin(), parts.end()};
}

// The worker's name in an owner "<name>:<run id>".
inline std::string_view worker_name(std::string_view owner) { return owner.substr(0, owner.find(':')); }

// The device memory of one model on a worker.
struct ModelMemory {
  struct Limit {
    std::string plan;             // how the weights are placed: "resident", "model", "block"
    std::int64_t max_pixels = 0;  // width × height × frames of the largest request that the plan holds
    bool operator==(const Limit&) const = default;
  };
  std::vector<Limit> limits;         // fastest plan first; empty: unknown
  std::int64_t available_bytes = 0;  // that the worker may use
  std::int64_t bytes = 0;            // of the weights
  bool resident = true;              // the weights are on the device
  std::int64_t load_us = 0;          // from host memory to the device; 0: unknown

  bool operator==(const ModelMemory&) const = default;
  // The fastest plan that holds the request; nullptr: none, or the limits are unknown.
  const Limit* plan_for(std::int64_t pixels) const {
    const auto at =
        std::find_if(limits.begin(), limits.end(), [&](const Limit& limit) { return pixels <= limit.max_pixels; });
    return at == limits.end() ? nullptr : &*at;
  }
};

// The heartbeat of one run of a worker.
struct WorkerInfo {
  std::string name, boot;  // boot: the run id
  std::string host;
  int pid = 0;
  std::string state = "starting";  // starting ready draining stuck
  std::string device, device_name, precision;
  int gpus = 1;  // that share each unit, from `device` on
  std::vector<std::string> models, warm_classes;
  // Of each component with quantized linears, the number of linears by format: "dev/transformer: 494 nf4, 10 bf16".
  std::vector<std::string> quantized;
  std::map<std::string, ModelMemory> memory;  // by model; a model may be missing
  // LoRA adapters. A worker without slots cannot run units that need an adapter.
  int adapter_slots = 0;
  std::vector<std::string> adapters;          // in slots
  std::vector<std::string> host_adapters;     // in host memory; may also be in slots
  std::int64_t host_adapter_bytes = 0;        // capacity for adapters in host memory
  std::int64_t adapter_load_bytes_per_s = 0;  // measured speed of loading into host memory; 0: unknown
  std::int64_t adapter_swap_us = 0;           // measured time of a copy from host memory to a slot; 0: unknown
  // Since the worker's start: programs compiled for regions, and copies of adapters into slots.
  std::int64_t compiles = 0, adapter_swaps = 0;
  int capacity = 2;               // maximum of assigned units, including the running unit
  std::int64_t heartbeat_ms = 0;  // time of the latest heartbeat, by Redis' clock
  std::int64_t unheard_ms = 0;    // age of the latest heartbeat when this record was read
  std::int64_t started_ms = 0;
  std::string version;
  std::vector<UnitRef> units;  // assigned to this worker
  // The tenants of the jobs in `units`, by job. Filled only by Client::workers with `with_tenants`.
  std::map<std::string, std::string> tenants;
  std::string owner() const { return name + ":" + boot; }
};

// The state that an administrator wants a worker to have. kDraining: it takes no units until it is kReady again, also
// after a restart. kStopped: it drains and ends; only the run that was registered at the time of the request.
enum class Desired { kReady, kDraining, kStopped };

// What the leader predicts and publishes for all gateways.
struct FleetForecast {
  struct Model {
    std::int64_t backlog_us = 0;     // predicted run of the units that wait, and what remains of those that run
    std::int64_t units = 0;          // that have not ended
    std::int64_t ready_workers = 0;  // that have the model
    bool operator==(const Model&) const = default;
  };
  std::map<std::string, Model> models;
  std::int64_t ready_workers = 0;
  // By owner, when its units end that have started. An owner without such units is missing.
  std::map<std::string, std::int64_t> ends_ms;
};

// What the leader predicts of an open job.
struct JobOutlook {
  std::int64_t position = -1;  // number of jobs of its model that start before it; -1: it has started
  std::int64_t eta_ms = 0;     // when its last unit ends; 0: unknown
};

}  // namespace ditfleet::queue
