// Between what Redis stores and the types of types.h. Pure functions.
#pragma once

#include <string>
#include <string_view>

#include "shared/core/result.h"
#include "shared/queue/types.h"
#include "shared/redis/connection.h"

namespace ditfleet::queue {

// A unit's packed field: state|nonce|errors|crashes|owner|assigned|started|ended.
struct PackedUnit {
  std::string_view state;  // also "delayed" and "canceling"
  std::string_view nonce, owner;
  int errors = 0, crashes = 0;
  std::int64_t assigned_ms = 0, started_ms = 0, ended_ms = 0;

  job::State shown_state() const;  // delayed → ready, canceling → running
  int attempt() const;             // of the try that runs, or ran last; 0 before the first
};
PackedUnit parse_packed_unit(std::string_view field);  // views into `field`

std::int64_t to_int(std::string_view text);  // 0 for what is not a number

// "<id>:<unit>"
UnitRef parse_member(std::string_view member);

std::string error_json(const Error& error);
Error parse_error(std::string_view json_text);

// `kind`, `unit` and `data` as in the stream's fields t, u, d.
Event make_event(std::string id, std::string job, std::string kind, std::string_view unit, std::string_view data);
// One line of a feed message: "<id> <job> <kind> <unit> <data>".
Result<Event> parse_feed_line(std::string_view line);
// An entry of XRANGE: [id, [field, value, …]].
Result<Event> parse_event_entry(const std::string& job, const redis::Reply& entry);

// The reply of ditfleet_v1_job. An alias sets `same_as` and nothing else.
struct StoredJob {
  JobRecord record;
  std::string same_as;
};
StoredJob parse_job(const std::string& id, const redis::Reply& reply);

IntakeEntry parse_intake(const redis::Reply& entry);
Result<MailboxEntry> parse_mailbox(const redis::Reply& entry);

std::string worker_json(const WorkerInfo& info);
Result<WorkerInfo> parse_worker(std::string_view json_text);

}  // namespace ditfleet::queue
