// Converts between stored records and types.h. No side effects; thread-safe.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "shared/core/json.h"
#include "shared/core/result.h"
#include "shared/core/text.h"
#include "shared/queue/types.h"
#include "shared/redis/connection.h"

namespace ditfleet::queue {

// A unit's packed record (functions/base.lua), open or ended.
struct PackedUnit {
  std::string_view state;  // also "delayed" and "canceling"
  std::string_view nonce, owner;
  int errors = 0, lapses = 0;
  std::string_view failed_on;  // workers, separated by commas
  std::int64_t assigned_ms = 0, started_ms = 0;
  std::int64_t ended_ms = 0;  // 0: open

  job::State shown_state() const;  // delayed → ready
  int attempt() const;             // number of the current or last attempt; 0 before the first
};
PackedUnit parse_packed_unit(std::string_view field);  // views into `field`

inline std::int64_t to_int(std::string_view text) { return leading_integer(text); }
// A number of a record that another version may have written, in 0 … most. 0 if there is none.
std::int64_t number_in(const json::object& record, std::string_view name, std::int64_t most);
// The reply of TIME in microseconds.
Result<std::int64_t> parse_time_us(const redis::Reply& reply);

// "<id>:<unit>"
UnitRef parse_member(std::string_view member);

// Durations of phases in microseconds from a JSON object. Ignores invalid members.
std::map<std::string, std::int64_t> parse_phases(std::string_view json_text);

std::string error_json(const Error& error);
Error parse_error(std::string_view json_text);

// `text` is "<type> <unit> <data>" with a JSON object as data.
Event make_event(std::string id, std::string job, std::string_view text);
// Appends the event. If it is the last unit's final event, also appends an event for the end of the job, with the next
// id after the entry's. No other event of the job can have this id.
void append_events(Event event, std::vector<Event>& out);
// Parses a line of the entry `id`: "<job> <id of the previous event> <type> <unit> <data>".
Result<Event> parse_feed_line(const std::string& id, std::string_view line);

// A job's packed record (functions/base.lua), as views into `record`. `units` is 0 while the job is queued.
struct PackedJob {
  int units = 0;
  std::int64_t ready_ms = 0, cost_us = 0;
  int priority = 0;
  std::int64_t deadline_ms = 0;
  std::string_view entry;  // id of the intake entry, which contains the job's creation time
  std::string_view tenant, trace, class_key;
  int steps = 0;
  std::string_view adapters;  // digests, separated by commas
};
PackedJob parse_packed_job(std::string_view record);
// The last part of a packed job: its steps and, after a bar, its adapters. Adapters whose digest contains a bar or a
// comma are omitted. The list is only a hint for the router after a restart.
std::string packed_needs(int steps, const std::vector<std::string>& adapters);
// Adapters to evict: "<from host memory>|<from slots>", each a list separated by commas; "" if there are none. Omits
// the same adapters as packed_needs().
std::string packed_drops(const std::vector<std::string>& from_host, const std::vector<std::string>& from_slots);

// The reply of the Function `job`. If the job is an alias of another job, only `same_as` is set.
struct StoredJob {
  JobRecord record;
  std::string same_as;
};
StoredJob parse_job(const std::string& id, const redis::Reply& reply);

// The state of an open job, computed from its units.
job::State furthest(const std::vector<UnitRecord>& units);
UnitRecord unit_record(int unit, const PackedUnit& packed);

// Never fails: `problem` describes an invalid entry.
IntakeEntry parse_intake(const redis::Reply& entry);
// Whether an entry has the largest possible id. Redis accepts no further entries until such an entry is deleted.
bool is_last_entry(std::string_view entry_id);
// The error for an intake entry in the internal format of submit() that a client added with XADD.
Error imitation_of_submit();
// Appends the messages of one entry.
Result<void> parse_mailbox(const redis::Reply& entry, std::vector<MailboxEntry>& out);

std::string worker_json(const WorkerInfo& info);
// Omits invalid limits and clamps numbers of WorkerInfo::memory, so that the scheduler can add and multiply them.
Result<WorkerInfo> parse_worker(std::string_view json_text);

std::string forecast_json(const FleetForecast& forecast);
// Clamps numbers. kDataCorrupt: not a forecast.
Result<FleetForecast> parse_forecast(std::string_view json_text);

}  // namespace ditfleet::queue
