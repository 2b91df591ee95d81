// Between what Redis stores and the types of types.h. Pure functions.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shared/core/json.h"
#include "shared/core/result.h"
#include "shared/queue/types.h"
#include "shared/redis/connection.h"

namespace ditfleet::queue {

// A packed unit, open (in the hash `units`) or ended (in its job); functions/base.lua has the two forms.
struct PackedUnit {
  std::string_view state;  // also "delayed" and "canceling"
  std::string_view nonce, owner;
  int errors = 0, crashes = 0;
  std::int64_t assigned_ms = 0, started_ms = 0;
  std::int64_t ended_ms = 0;  // of an ended one

  job::State shown_state() const;  // delayed → ready, canceling → running
  int attempt() const;             // of the try that runs, or ran last; 0 before the first
};
PackedUnit parse_packed_unit(std::string_view field);  // views into `field`

std::int64_t to_int(std::string_view text);  // 0 for what is not a number
// The strings of a JSON array; none if it is not there or no array. Other items are left out.
std::vector<std::string> parse_strings(const json::value* value);

// "<id>:<unit>"
UnitRef parse_member(std::string_view member);

std::string error_json(const Error& error);
Error parse_error(std::string_view json_text);

// `text` as in the stream's field e: "<type> <unit> <data>", data a JSON object.
Event make_event(std::string id, std::string job, std::string_view text);
// Appends the event, and after the last unit's end the job's end, which is stored in the same entry: it gets
// the id that follows the entry's, which nothing else can have, for nothing follows a job's end.
void append_events(Event event, std::vector<Event>& out);
// One line of a feed message, which is in the entry `id`: "<job> <id before> <type> <unit> <data>".
Result<Event> parse_feed_line(const std::string& id, std::string_view line);

// An open or ended job's common part, packed as `functions/base.lua` says; views into `record`. units 0: queued.
struct PackedJob {
  int units = 0;
  std::int64_t ready_ms = 0, cost_us = 0;
  int priority = 0;
  std::int64_t deadline_ms = 0;
  std::string_view entry;  // of the intake, whose time is the job's creation
  std::string_view tenant, trace, class_key;
  int steps = 0;
  std::string_view adapters;  // names, with commas between
};
PackedJob parse_packed_job(std::string_view record);
// The end of a packed job: its steps and, behind a bar if there are any, the adapters that it needs. A name with a bar
// or a comma is left out: what is lost is a hint to the router after a restart.
std::string packed_needs(int steps, const std::vector<std::string>& adapters);
std::vector<std::string> split_adapters(std::string_view packed);
// What a worker is told to drop, "<of host memory>|<of slots>" with commas between; "": nothing. Names as above.
std::string packed_drops(const std::vector<std::string>& from_host, const std::vector<std::string>& from_slots);

// The reply of ditfleet_v1_job. An alias sets `same_as` and nothing else.
struct StoredJob {
  JobRecord record;
  std::string same_as;
};
StoredJob parse_job(const std::string& id, const redis::Reply& reply);

// The state of a job that has not ended, from its units.
job::State furthest(const std::vector<UnitRecord>& units);
// What an open or ended packed unit says of itself.
UnitRecord unit_record(int unit, const PackedUnit& packed);

// At least one: an entry holds what was submitted in one call. Never fails: what is wrong with an entry is its
// `problem`. Where there are several jobs, the entry_id of each is "<entry>/<which of them>".
std::vector<IntakeEntry> parse_intake(const redis::Reply& entry);
// The entry in the stream.
std::string_view stream_id(std::string_view entry_id);
// Whether nothing could be added behind it: once it is gone, the intake is numbered by the clock again.
bool is_last_entry(std::string_view entry_id);
// What is told of an entry that came by XADD and looks like one of `submit`.
Error imitation_of_submit();
// Appends what one entry says: several assignments may come in one.
Result<void> parse_mailbox(const redis::Reply& entry, std::vector<MailboxEntry>& out);

std::string worker_json(const WorkerInfo& info);
Result<WorkerInfo> parse_worker(std::string_view json_text);

}  // namespace ditfleet::queue
