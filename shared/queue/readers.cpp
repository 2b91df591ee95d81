// Client: what gateways read.
#include <spdlog/spdlog.h>

#include <algorithm>

#include "shared/core/excerpt.h"
#include "shared/core/ids.h"
#include "shared/queue/calls.h"
#include "shared/queue/records.h"

namespace ditfleet::queue {
namespace {

Error no_such_job(const std::string& id) { return Error{Code::kNotFound, "[queue] there is no job " + id}; }

// A job of the index as it was read; views into the replies.
struct Listed {
  std::string_view id, score;
  bool shown = false;               // it is there, and the caller may see it
  std::optional<job::State> ended;  // its state, if it has ended
  PackedJob packed;
  std::string_view spec, ended_ms, first_record;
  const std::string* error = nullptr;  // JSON, if there is one
  std::size_t first_unit = 0;          // of an open one: where its units stand among those that were read
};

// own: o, state, ended, spec, error, u0 of the job's hash. What ended between the reads is read from its own.
void read_listed(const redis::Reply& open, const redis::Reply& spec, const std::vector<redis::Reply>& own,
                 Listed& job) {
  if (own.size() != 6 || (open.is_nil() && own[0].is_nil())) return;  // forgotten meanwhile
  job.shown = true;
  job.ended = job::state_from_name(own[1].text);
  job.packed = parse_packed_job(job.ended ? own[0].text : open.text);
  job.spec = job.ended ? own[3].text : spec.text;
  job.ended_ms = own[2].text;
  job.first_record = own[5].text;
  if (!own[4].is_nil()) job.error = &own[4].text;
}

JobRecord listed_record(const Listed& job, const redis::Reply& units) {
  JobRecord record;
  record.id = job.id;
  record.tenant = job.packed.tenant;
  record.units = std::max(1, job.packed.units);
  if (job.ended) {
    record.state = *job.ended;
    record.ended_ms = std::max(to_int(job.ended_ms), parse_packed_unit(job.first_record).ended_ms);
  } else if (job.packed.units > 0) {
    std::vector<UnitRecord> unit_records;
    for (int u = 0; u < job.packed.units; ++u) {
      const redis::Reply& unit = units.elements.at(job.first_unit + static_cast<std::size_t>(u));
      unit_records.push_back(unit_record(u, parse_packed_unit(unit.text)));
      // One that ended a moment ago is not there any more: the job is under way all the same.
      if (unit.is_nil()) unit_records.back().state = job::State::kRunning;
    }
    record.state = furthest(unit_records);
  }
  record.class_key = job.packed.class_key;
  record.created_ms = to_int(job.score);
  record.ready_ms = job.packed.ready_ms;
  record.deadline_ms = job.packed.deadline_ms;
  record.cost_us = job.packed.cost_us;
  record.traceparent = job.packed.trace;
  record.spec = job.spec;
  if (job.error != nullptr) record.error = parse_error(*job.error);
  return record;
}

}  // namespace

asio::awaitable<Result<JobRecord>> Client::job(const std::string& id, const std::string& tenant, Deadline deadline) {
  const auto impl = impl_;
  if (!is_valid_id(id)) co_return no_such_job(id);
  const Keys& keys = impl->keys_;
  std::string name = id;
  for (int hop = 0; hop < 2; ++hop) {
    auto reply = co_await impl->call(fcall_ro("job", 7) << keys.job(name) << keys.in() << keys.units() << keys.open()
                                                        << keys.specs() << keys.last() << keys.events() << name,
                                     deadline);
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
                                              const std::string& cursor, Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  // A cursor is "<score>:<id>" of the last job looked at; jobs of one millisecond follow by id.
  std::string from = "+inf", after_id;
  if (!cursor.empty()) {
    const auto colon = cursor.find(':');
    if (colon == std::string::npos || !is_valid_id(cursor.substr(colon + 1)) ||
        cursor.find_first_not_of("0123456789") != colon) {
      co_return Error{Code::kInvalidArgument, "[queue] '" + cursor + "' is not a cursor of an earlier page", "cursor"};
    }
    from = cursor.substr(0, colon);
    after_id = cursor.substr(colon + 1);
  }
  const std::size_t want = static_cast<std::size_t>(std::clamp(limit, 1, 1000));
  constexpr int kPage = 200, kMostPages = 50;
  JobPage page;
  std::vector<std::string> entries;  // of the page's jobs: where the spec is while the job is queued, else empty
  bool last = false;
  for (int pages = 0; pages < kMostPages && !last && page.jobs.size() < want; ++pages) {
    redis::Command range("ZREVRANGEBYSCORE");
    range << keys.jobs() << from << "-inf"
          << "WITHSCORES"
          << "LIMIT" << pages * kPage << kPage;
    const auto found = co_await impl->connection_->execute(std::move(range), deadline);
    if (!found) co_return found.error();
    const auto& elements = found->elements;
    last = elements.size() < 2 * kPage;

    std::vector<Listed> jobs;
    std::vector<redis::Command> reads(2);
    reads[0] << "HMGET" << keys.open();
    reads[1] << "HMGET" << keys.specs();
    for (std::size_t i = 0; i + 1 < elements.size(); i += 2) {
      const std::string& id = elements[i].text;
      const std::string& score = elements[i + 1].text;
      if (score == from && id >= after_id) continue;  // of the page before
      jobs.push_back({.id = id, .score = score});
      reads[0] << id;
      reads[1] << id;
      reads.push_back(redis::Command("HMGET") << keys.job(id) << "o"
                                              << "state"
                                              << "ended"
                                              << "spec"
                                              << "error"
                                              << "u0");
    }
    if (jobs.empty()) continue;
    const auto records = co_await impl->connection_->execute_all(std::move(reads), deadline);
    for (const auto& read : records) {
      if (!read) co_return read.error();
    }
    redis::Command unit_names("HMGET");
    unit_names << keys.units();
    std::size_t unit_count = 0;
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      Listed& job = jobs[i];
      read_listed(records[0]->elements.at(i), records[1]->elements.at(i), records[i + 2]->elements, job);
      if (!tenant.empty() && job.packed.tenant != tenant) job.shown = false;
      if (!job.shown || job.ended) continue;
      job.first_unit = unit_count;
      unit_count += static_cast<std::size_t>(job.packed.units);
      for (int u = 0; u < job.packed.units; ++u) unit_names << std::string(job.id) + ":" + std::to_string(u);
    }
    redis::Reply units;
    if (unit_count > 0) {
      auto held = co_await impl->connection_->execute(std::move(unit_names), deadline);
      if (!held) co_return held.error();
      units = std::move(*held);
    }

    std::size_t looked_at = 0;
    while (looked_at < jobs.size() && page.jobs.size() < want) {
      const Listed& job = jobs[looked_at++];
      page.next_cursor = std::string(job.score) + ":" + std::string(job.id);
      if (!job.shown) continue;
      JobRecord record = listed_record(job, units);
      if (state && record.state != *state) continue;
      entries.emplace_back(!job.ended && job.packed.units == 0 ? job.packed.entry : std::string_view());
      page.jobs.push_back(std::move(record));
    }
    if (looked_at < jobs.size()) last = false;
  }
  if (last) page.next_cursor.clear();  // else the page is full, or a rare filter found fewer: the cursor goes on

  std::vector<redis::Command> specs;
  std::vector<JobRecord*> whose;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].empty()) continue;
    specs.push_back(redis::Command("XRANGE") << keys.in() << stream_id(entries[i]) << stream_id(entries[i]));
    whose.push_back(&page.jobs[i]);
  }
  if (!specs.empty()) {
    const auto read = co_await impl->connection_->execute_all(std::move(specs), deadline);
    for (std::size_t i = 0; i < read.size(); ++i) {
      if (!read[i]) co_return read[i].error();
      if (read[i]->elements.empty()) continue;
      for (IntakeEntry& job : parse_intake(read[i]->elements[0])) {
        if (job.id == whose[i]->id) whose[i]->spec = std::move(job.spec);
      }
    }
  }
  co_return page;
}

asio::awaitable<Result<std::vector<Event>>> Client::events(const std::string& job, const std::string& after, int limit,
                                                           Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  std::vector<Event> out;
  if (!is_valid_id(job)) co_return no_such_job(job);
  // From `after` itself on: it may be the last unit's end, whose entry holds the job's end as well.
  const std::string from = after.empty() || after == "0" ? "0-0" : after;
  auto reply = co_await impl->call(
      fcall_ro("events", 4) << keys.job(job) << keys.open() << keys.last() << keys.events() << job << from, deadline);
  if (!reply && reply.error().kind == "BADARG") {
    co_return Error{Code::kInvalidArgument,
                    "[queue] '" + after + "' is not an event id; they look like 1763700000000-0", "after"};
  }
  if (!reply) co_return reply.error();
  const std::size_t most = static_cast<std::size_t>(std::max(limit, 1));
  const auto& flat = reply->elements;
  for (std::size_t i = 0; i + 1 < flat.size() && out.size() < most; i += 2) {
    const std::size_t before = out.size();
    append_events(make_event(flat[i].text, job, flat[i + 1].text), out);
    if (flat[i].text == after) out.erase(out.begin() + static_cast<std::ptrdiff_t>(before));
  }
  if (out.size() > most) out.resize(most);
  co_return out;
}

asio::awaitable<Result<std::vector<WorkerInfo>>> Client::workers(Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  auto names = co_await impl->connection_->execute(redis::Command("ZRANGE") << keys.workers() << 0 << -1, deadline);
  if (!names) co_return names.error();
  std::vector<redis::Command> reads;
  for (const redis::Reply& name : names->elements) {
    reads.push_back(redis::Command("HMGET") << keys.worker(name.text) << "info"
                                            << "heartbeat");
  }
  reads.push_back(redis::Command("TIME"));
  auto records = co_await impl->connection_->execute_all(std::move(reads), deadline);
  if (!records.back()) co_return records.back().error();
  const auto& time = records.back()->elements;
  const std::int64_t now_ms = time.size() == 2 ? to_int(time[0].text) * 1000 + to_int(time[1].text) / 1000 : 0;
  std::vector<WorkerInfo> out;
  for (std::size_t i = 0; i + 1 < records.size(); ++i) {
    const auto& record = records[i];
    if (!record && is_retryable(record.error().code)) co_return record.error();
    if (record && (record->elements.size() != 2 || record->elements[0].is_nil())) continue;  // gone meanwhile
    const std::string& name = names->elements[i].text;
    auto info = record ? parse_worker(record->elements[0].text) : Result<WorkerInfo>(record.error());
    if (info && info->name != name) info = invalid_argument("it names the worker '" + excerpt(info->name, 64) + "'");
    if (!info) {  // anybody may have written it: the fleet does without that one
      if (impl->unreadable_workers_.insert(name).second) {
        spdlog::warn("queue: the record of worker '{}' is left out: {}", excerpt(name, 64), info.error().message);
      }
      continue;
    }
    impl->unreadable_workers_.erase(name);
    info->heartbeat_ms = to_int(record->elements[1].text);
    info->unheard_ms = std::max<std::int64_t>(0, now_ms - info->heartbeat_ms);
    out.push_back(std::move(*info));
  }
  co_return out;
}

}  // namespace ditfleet::queue
