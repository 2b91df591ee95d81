// Converts between what Redis stores and types.h. Pure functions.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shared/core/json.h"
#include "shared/core/result.h"
#include "shared/queue/types.h"
#include "shared/redis/connection.h"

namespace ditfleet::queue {

// A unit's packed record (functions/base.lua), open or ended.
struct PackedUnit {
  std::string_view state;  // also "delayed" and "canceling"
  std::string_view nonce, owner;
  int errors = 0, crashes = 0;
  std::int64_t assigned_ms = 0, started_ms = 0;
  std::int64_t ended_ms = 0;  // 0: open

  job::State shown_state() const;  // delayed → ready, canceling → running
  int attempt() const;             // number of the current or last attempt; 0 before the first
};
PackedUnit parse_packed_unit(std::string_view field);  // views into `field`

std::int64_t to_int(std::string_view text);  // 0 if it is not a number
// The reply of TIME in microseconds.
Result<std::int64_t> parse_time_us(const redis::Reply& reply);
// The strings of a JSON array; empty if `value` is null or no array. Skips other items.
std::vector<std::string> parse_strings(const json::value* value);

// "<id>:<unit>"
UnitRef parse_member(std::string_view member);

std::string error_json(const Error& error);
Error parse_error(std::string_view json_text);

// `text` is "<type> <unit> <data>", data a JSON object.
Event make_event(std::string id, std::string job, std::string_view text);
// Appends the event. The last unit's end also carries the job's end, which becomes an event of its own: its id follows
// the entry's, which no other event of the job can have.
void append_events(Event event, std::vector<Event>& out);
// One event of the entry `id`: "<job> <id before> <type> <unit> <data>".
Result<Event> parse_feed_line(const std::string& id, std::string_view line);

// A job's packed record (functions/base.lua); views into `record`. units is 0 while it is queued.
struct PackedJob {
  int units = 0;
  std::int64_t ready_ms = 0, cost_us = 0;
  int priority = 0;
  std::int64_t deadline_ms = 0;
  std::string_view entry;  // of the intake; its time is the job's creation
  std::string_view tenant, trace, class_key;
  int steps = 0;
  std::string_view adapters;  // names, separated by commas
};
PackedJob parse_packed_job(std::string_view record);
// The end of a packed job: its steps and, after a bar, the adapters it needs. Omits names with a bar or a comma: they
// are a hint to the router after a restart.
std::string packed_needs(int steps, const std::vector<std::string>& adapters);
std::vector<std::string> split_adapters(std::string_view packed);
// Adapters to evict: "<from host memory>|<from slots>", separated by commas; "": none. Names as above.
std::string packed_drops(const std::vector<std::string>& from_host, const std::vector<std::string>& from_slots);

// The reply of `job`. An alias of another job only sets `same_as`.
struct StoredJob {
  JobRecord record;
  std::string same_as;
};
StoredJob parse_job(const std::string& id, const redis::Reply& reply);

// The state of a job that has not ended, from its units.
job::State furthest(const std::vector<UnitRecord>& units);
UnitRecord unit_record(int unit, const PackedUnit& packed);

// Never fails: what is wrong with an entry is its `problem`.
IntakeEntry parse_intake(const redis::Reply& entry);
// Whether an entry has the last possible id. Once it is gone, the ids of the intake follow the clock again.
bool is_last_entry(std::string_view entry_id);
// Why an entry is rejected that came by XADD and looks like one of `submit`.
Error imitation_of_submit();
// Appends the messages of one entry.
Result<void> parse_mailbox(const redis::Reply& entry, std::vector<MailboxEntry>& out);

std::string worker_json(const WorkerInfo& info);
Result<WorkerInfo> parse_worker(std::string_view json_text);

}  // namespace ditfleet::queue
