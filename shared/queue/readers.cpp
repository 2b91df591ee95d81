// Client: what gateways read.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <map>

#include "shared/core/excerpt.h"
#include "shared/core/ids.h"
#include "shared/core/text.h"
#include "shared/queue/calls.h"
#include "shared/queue/records.h"
#include "shared/queue/reply_fields.h"

namespace ditfleet::queue {
namespace {

constexpr int kEventsPerCall = 500;

Error no_such_job(const std::string& id) { return not_found("[queue] no such job: " + id); }

// "<milliseconds>-<number>"
bool is_event_id(std::string_view id) {
  const auto dash = id.find_first_not_of("0123456789");
  return dash != 0 && dash != id.npos && id[dash] == '-' && dash + 1 < id.size() &&
         id.find_first_not_of("0123456789", dash + 1) == id.npos;
}

// A job of the index; views into the replies.
struct Listed {
  std::string_view id, score;
  const std::vector<redis::Reply>* row = nullptr;  // of the Function `list`
  bool shown = false;                              // it exists and the caller may see it
  std::optional<job::State> ended;                 // its state, if it has ended
  bool paused = false;                             // it is queued, and was paused
  PackedJob packed;
};

// The row's o, state, ended and u0 have what the open record lacks if the job has just ended.
void read_listed(const redis::Reply& reply, Listed& job) {
  const auto& row = reply.elements;
  if (row.size() < kFirstListedUnit) return;  // it was forgotten in between
  job.row = &row;
  job.shown = true;
  job.ended = job::state_from_name(row[2].text);
  job.paused = job.ended == job::State::kPaused;
  if (job.paused) job.ended.reset();
  job.packed = parse_packed_job(job.ended ? row[1].text : row[0].text);
}

JobRecord listed_record(const Listed& job) {
  const auto& row = *job.row;
  JobRecord record;
  record.id = job.id;
  record.tenant = job.packed.tenant;
  record.units = std::max(1, job.packed.units);
  if (job.ended) {
    record.state = *job.ended;
    record.ended_ms = std::max(to_int(row[3].text), parse_packed_unit(row[4].text).ended_ms);
  } else if (row.size() > kFirstListedUnit) {
    std::vector<UnitRecord> unit_records;
    for (std::size_t i = kFirstListedUnit; i < row.size(); ++i) {
      unit_records.push_back(unit_record(static_cast<int>(i - kFirstListedUnit), parse_packed_unit(row[i].text)));
      if (row[i].is_nil()) unit_records.back().state = job::State::kSucceeded;  // it has ended, and is gone
    }
    record.state = furthest(unit_records);
  } else if (job.paused) {
    record.state = job::State::kPaused;
  }
  record.class_key = job.packed.class_key;
  record.created_ms = to_int(job.score);
  record.ready_ms = job.packed.ready_ms;
  record.deadline_ms = job.packed.deadline_ms;
  record.cost_us = job.packed.cost_us;
  record.traceparent = job.packed.trace;
  return record;
}

// The last job that list() has looked at. Jobs of one millisecond follow by id.
struct Position {
  std::string score, id;
};

// A cursor is "<score>:<id>". Empty: before the first job.
Result<Position> parse_cursor(const std::string& cursor, bool oldest_first) {
  if (cursor.empty()) return Position{oldest_first ? "-inf" : "+inf", ""};
  const auto colon = cursor.find(':');
  if (colon == std::string::npos || !is_valid_id(cursor.substr(colon + 1)) ||
      !number_of<std::int64_t>(std::string_view(cursor).substr(0, colon), 0)) {
    return Error{Code::kInvalidArgument,
                 "[queue] '" + cursor + "' is not a cursor; use the cursor from the previous page", "cursor"};
  }
  return Position{cursor.substr(0, colon), cursor.substr(colon + 1)};
}

// Reads the specs and errors of listed jobs. `entries`: the intake entry of each job that is not admitted, else "". The
// hash of a job has the spec once the job has ended.
asio::awaitable<Result<void>> read_specs(redis::Connection& connection, const Keys& keys,
                                         const std::vector<std::string>& entries, std::vector<JobRecord>& jobs,
                                         Deadline deadline) {
  std::vector<redis::Command> reads;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const std::string& id = jobs[i].id;
    if (entries[i].empty()) {
      reads.push_back(redis::Command("HGET") << keys.specs() << id);
    } else {
      reads.push_back(redis::Command("XRANGE") << keys.in() << entries[i] << entries[i]);
    }
    reads.push_back(redis::Command("HMGET") << keys.job(id) << "spec"
                                            << "error");
  }
  const auto read = co_await connection.execute_all(std::move(reads), deadline);
  for (const auto& reply : read) {
    if (!reply) co_return reply.error();
  }
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const redis::Reply& open = *read[2 * i];
    const auto& own = read[2 * i + 1]->elements;
    if (own.size() != 2) continue;
    jobs[i].spec = !own[0].is_nil()        ? own[0].text
                   : open.elements.empty() ? open.text
                                           : parse_intake(open.elements[0]).spec;
    if (!own[1].is_nil()) jobs[i].error = parse_error(own[1].text);
  }
  co_return Result<void>();
}

}  // namespace

asio::awaitable<Result<JobRecord>> Client::job(const std::string& id, const std::string& tenant, Deadline deadline) {
  const auto impl = impl_;
  if (!is_valid_id(id)) co_return no_such_job(id);
  std::string name = id;
  for (int hop = 0; hop < 2; ++hop) {
    auto reply = co_await impl->read_job(name, deadline);
    if (!reply) co_return reply.error();
    if (reply->elements.size() != 5 || (reply->elements[0].elements.empty() && reply->elements[1].text.empty())) break;
    StoredJob stored = parse_job(name, *reply);
    if (!tenant.empty() && stored.record.tenant != tenant) break;
    if (stored.same_as.empty()) co_return std::move(stored.record);
    name = stored.same_as;
  }
  co_return no_such_job(id);
}

asio::awaitable<Result<JobPage>> Client::list(const std::string& tenant, std::optional<job::State> state, int limit,
                                              const std::string& cursor, Deadline deadline, bool oldest_first,
                                              std::function<bool(const JobRecord&)> keep) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  const auto from = parse_cursor(cursor, oldest_first);
  if (!from) co_return from.error();
  const std::size_t want = static_cast<std::size_t>(std::clamp(limit, 1, 1000));
  constexpr int kPage = 200, kMostPages = 50;
  JobPage page;
  std::vector<std::string> entries;  // the intake entries of the page's queued jobs; "": it is admitted
  bool last = false;
  for (int pages = 0; pages < kMostPages && !last && page.jobs.size() < want; ++pages) {
    redis::Command range(oldest_first ? "ZRANGEBYSCORE" : "ZREVRANGEBYSCORE");
    range << keys.jobs() << from->score << (oldest_first ? "+inf" : "-inf") << "WITHSCORES"
          << "LIMIT" << pages * kPage << kPage;
    const auto found = co_await impl->connection_->execute(std::move(range), deadline);
    if (!found) co_return found.error();
    const auto& elements = found->elements;
    last = elements.size() < 2 * kPage;

    std::vector<Listed> jobs;
    for (std::size_t i = 0; i + 1 < elements.size(); i += 2) {
      const std::string& id = elements[i].text;
      const std::string& score = elements[i + 1].text;
      if (score == from->score && (oldest_first ? id <= from->id : id >= from->id)) continue;  // on the page before
      jobs.push_back({.id = id, .score = score});
    }
    if (jobs.empty()) continue;
    redis::Command read = fcall_ro("list", 2 + jobs.size());
    read << keys.units() << keys.open();
    for (const Listed& job : jobs) read << keys.job(job.id);
    for (const Listed& job : jobs) read << job.id;
    const auto rows = co_await impl->call(std::move(read), deadline);
    if (!rows) co_return rows.error();
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      read_listed(rows->elements.at(i), jobs[i]);
      if (!tenant.empty() && jobs[i].packed.tenant != tenant) jobs[i].shown = false;
    }

    std::size_t looked_at = 0;
    while (looked_at < jobs.size() && page.jobs.size() < want) {
      const Listed& job = jobs[looked_at++];
      page.next_cursor = std::string(job.score) + ":" + std::string(job.id);
      if (!job.shown) continue;
      JobRecord record = listed_record(job);
      if ((state && record.state != *state) || (keep && !keep(record))) continue;
      entries.emplace_back(!job.ended && job.packed.units == 0 ? job.packed.entry : std::string_view());
      page.jobs.push_back(std::move(record));
    }
    if (looked_at < jobs.size()) last = false;
  }
  if (last) page.next_cursor.clear();

  // Specs may be long, so only those of the jobs that are returned are read.
  if (const auto read = co_await read_specs(*impl->connection_, keys, entries, page.jobs, deadline); !read)
    co_return read.error();
  co_return page;
}

asio::awaitable<Result<std::vector<Event>>> Client::events(const std::string& job, const std::string& after, int limit,
                                                           Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  std::vector<Event> out;
  if (!is_valid_id(job)) co_return no_such_job(job);
  // Reads `after` itself too: it may be the last unit's end, whose entry also holds the job's end.
  const std::string from = after.empty() || after == "0" ? "0-0" : after;
  if (!is_event_id(from)) {
    co_return Error{Code::kInvalidArgument,
                    "[queue] '" + after + "' is not an event id; event ids look like 1763700000000-0", "after"};
  }
  const std::size_t most = static_cast<std::size_t>(std::max(limit, 1));
  std::map<std::pair<std::int64_t, std::int64_t>, std::pair<std::string, std::string>> found;  // the oldest, in order
  std::vector<std::string> next;
  do {
    redis::Command command = fcall_ro("events", 4);
    command << keys.job(job) << keys.open() << keys.last() << keys.events() << job << from << kEventsPerCall;
    for (const std::string& entry : next) command << entry;
    auto reply = co_await impl->call(std::move(command), deadline);
    if (!reply) co_return reply.error();
    auto& page = reply->elements;
    if (page.size() % 2 != 1) co_return internal_error("[queue] `events` did not reply with ids and events");
    next.clear();
    for (redis::Reply& entry : page[0].elements) next.push_back(std::move(entry.text));
    for (std::size_t i = 1; i < page.size(); i += 2) {
      const auto dash = page[i].text.find('-');
      const std::pair order{to_int(page[i].text), to_int(std::string_view(page[i].text).substr(dash + 1))};
      found.try_emplace(order, std::move(page[i].text), std::move(page[i + 1].text));
      if (found.size() > most + 1) found.erase(std::prev(found.end()));  // one more, because `after` is not returned
    }
  } while (!next.empty());
  for (const auto& [order, entry] : found) {
    const std::size_t before = out.size();
    append_events(make_event(entry.first, job, entry.second), out);
    if (entry.first == after) out.erase(out.begin() + static_cast<std::ptrdiff_t>(before));
  }
  if (out.size() > most) out.resize(most);
  co_return out;
}

asio::awaitable<Result<Event>> Client::event(const std::string& job, const std::string& id, Deadline deadline) {
  const auto impl = impl_;
  const Error missing{Code::kNotFound, "[queue] no such event: " + id};
  if (!is_event_id(id)) co_return missing;
  auto reply =
      co_await impl->connection_->execute(redis::Command("XRANGE") << impl->keys_.events() << id << id, deadline);
  if (!reply) co_return reply.error();
  for (const redis::Reply& entry : reply->elements) {  // at most one
    if (entry.elements.size() != 2 || entry.elements[1].elements.size() != 2) break;
    const std::string lines = "\n" + entry.elements[1].elements[1].text;
    const auto at = lines.find("\n" + job + " ");
    if (at == lines.npos) break;
    co_return parse_feed_line(id, std::string_view(lines).substr(at + 1, lines.find('\n', at + 1) - at - 1));
  }
  co_return missing;
}

asio::awaitable<Result<std::vector<WorkerInfo>>> Client::workers(Deadline deadline, bool with_tenants) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  auto reply =
      co_await impl->call(fcall_ro("workers", 2) << keys.workers() << keys.open() << (with_tenants ? 1 : 0), deadline);
  if (!reply) co_return reply.error();
  const auto& rows = reply->elements;
  if (rows.empty()) co_return internal_error("[queue] `workers` did not reply with the time");
  std::vector<WorkerInfo> out;
  for (std::size_t i = 1; i < rows.size(); ++i) {
    const auto& row = rows[i].elements;  // name, record, heartbeat, [job, tenant, …]
    if (row.size() != 4) co_return internal_error("[queue] `workers` replied with an invalid row");
    const std::string& name = row[0].text;
    auto info = parse_worker(row[1].text);
    if (info && info->name != name) info = invalid_argument("it contains the name '" + excerpt(info->name, 64) + "'");
    if (!info) {  // other clients may write to the registry
      if (impl->unreadable_workers_.insert(name).second) {
        spdlog::warn("queue: ignoring the record of worker '{}': {}", excerpt(name, 64), info.error().message);
      }
      continue;
    }
    impl->unreadable_workers_.erase(name);
    info->heartbeat_ms = to_int(row[2].text);
    info->unheard_ms = std::max<std::int64_t>(0, rows[0].integer - info->heartbeat_ms);
    for (const auto& [job, tenant] : fields_of(row[3])) info->tenants.emplace(job, tenant);
    out.push_back(std::move(*info));
  }
  co_return out;
}

asio::awaitable<Result<Depth>> Client::depth(Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  std::vector<redis::Command> reads;
  reads.push_back(redis::Command("TIME"));
  reads.push_back(redis::Command("XLEN") << keys.in());
  reads.push_back(redis::Command("HLEN") << keys.specs());
  reads.push_back(redis::Command("ZCARD") << keys.ready());
  const auto replies = co_await impl->connection_->execute_all(std::move(reads), deadline);
  for (const auto& reply : replies) {
    if (!reply) co_return reply.error();
  }
  const auto time_us = parse_time_us(*replies[0]);
  if (!time_us) co_return time_us.error();
  const auto count = [&](std::size_t i) { return static_cast<std::size_t>(replies[i]->integer); };
  co_return Depth{.queued_jobs = count(1), .admitted_jobs = count(2), .ready_units = count(3), .time_us = *time_us};
}

}  // namespace ditfleet::queue
