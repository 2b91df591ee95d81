// Client: what gateways read.
#include <algorithm>

#include "shared/core/ids.h"
#include "shared/queue/calls.h"
#include "shared/queue/records.h"

namespace ditfleet::queue {
namespace {

Error no_such_job(const std::string& id) { return Error{Code::kNotFound, "[queue] there is no job " + id}; }

}  // namespace

asio::awaitable<Result<JobRecord>> Client::job(const std::string& id, const std::string& tenant, Deadline deadline) {
  const auto impl = impl_;
  if (!is_valid_id(id)) co_return no_such_job(id);
  const Keys& keys = impl->keys_;
  std::string name = id;
  for (int hop = 0; hop < 2; ++hop) {
    auto reply = co_await impl->call(fcall_ro("job", 7) << keys.job(name) << keys.in() << keys.units() << keys.open() << keys.specs()
                                                            << keys.last() << keys.events() << name, deadline);
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
  int offset = 0;
  for (int pages = 0; pages < kMostPages; ++pages, offset += kPage) {
    redis::Command range("ZREVRANGEBYSCORE");
    range << keys.jobs() << from << "-inf" << "WITHSCORES" << "LIMIT" << offset << kPage;
    auto found = co_await impl->connection_->execute(std::move(range), deadline);
    if (!found) co_return found.error();
    const auto& elements = found->elements;
    std::vector<std::size_t> candidates;
    std::vector<redis::Command> reads(2);
    reads[0] << "HMGET" << keys.open();
    reads[1] << "HMGET" << keys.specs();
    for (std::size_t i = 0; i + 1 < elements.size(); i += 2) {
      if (elements[i + 1].text == from && elements[i].text >= after_id) continue;  // of the page before
      candidates.push_back(i);
      reads[0] << elements[i].text;
      reads[1] << elements[i].text;
      reads.push_back(redis::Command("HMGET") << keys.job(elements[i].text) << "o" << "state" << "ended" << "spec" << "error" << "u0");
    }
    if (candidates.empty()) reads.clear();
    auto records = co_await impl->connection_->execute_all(std::move(reads), deadline);
    for (const auto& read : records) {
      if (!read) co_return read.error();
    }
    for (std::size_t c = 0; c < candidates.size(); ++c) {
      const auto& v = records[c + 2]->elements;
      const auto& open = records[0]->elements.at(c);
      const std::string& id = elements[candidates[c]].text;
      page.next_cursor = elements[candidates[c] + 1].text + ":" + id;
      if (v.size() != 6 || (open.is_nil() && v[0].is_nil())) continue;  // forgotten meanwhile
      // What ended between the first read and its own is read from its own.
      const auto ended = job::state_from_name(v[1].text);
      const PackedJob packed = parse_packed_job(ended ? v[0].text : open.text);
      if (!tenant.empty() && packed.tenant != tenant) continue;
      JobRecord record;
      record.id = id;
      record.tenant = packed.tenant;
      record.units = std::max(1, packed.units);
      if (ended) {
        record.state = *ended;
        record.ended_ms = std::max(to_int(v[2].text), parse_packed_unit(v[5].text).ended_ms);
      } else if (packed.units == 0) {
        auto entry = co_await impl->connection_->execute(redis::Command("XRANGE") << keys.in() << packed.entry << packed.entry, deadline);
        if (!entry) co_return entry.error();
        if (!entry->elements.empty()) record.spec = parse_intake(entry->elements[0]).spec;
      } else {
        redis::Command units("HMGET");
        units << keys.units();
        for (int u = 0; u < packed.units; ++u) units << id + ":" + std::to_string(u);
        auto held = co_await impl->connection_->execute(std::move(units), deadline);
        if (!held) co_return held.error();
        std::vector<UnitRecord> unit_records;
        for (const redis::Reply& unit : held->elements) {
          // One that ended a moment ago is not there any more: the job is under way all the same.
          UnitRecord one = unit_record(0, parse_packed_unit(unit.text));
          if (unit.is_nil()) one.state = job::State::kRunning;
          unit_records.push_back(std::move(one));
        }
        record.state = furthest(unit_records);
      }
      if (state && record.state != *state) continue;
      record.class_key = packed.class_key;
      record.created_ms = to_int(elements[candidates[c] + 1].text);
      record.ready_ms = packed.ready_ms;
      record.deadline_ms = packed.deadline_ms;
      record.cost_us = packed.cost_us;
      record.traceparent = packed.trace;
      if (ended || packed.units > 0) record.spec = ended ? v[3].text : records[1]->elements.at(c).text;
      if (!v[4].is_nil()) record.error = parse_error(v[4].text);
      page.jobs.push_back(std::move(record));
      if (page.jobs.size() == want) {
        const bool last = elements.size() < 2 * kPage && c + 1 == candidates.size();
        if (last) page.next_cursor.clear();
        co_return page;
      }
    }
    if (elements.size() < 2 * kPage) {
      page.next_cursor.clear();
      co_return page;
    }
  }
  co_return page;  // a rare filter: fewer than asked for, and the cursor goes on
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
  if (!reply && reply.error().message.find("BADARG events:") != std::string::npos) {
    co_return Error{Code::kInvalidArgument, "[queue] '" + after + "' is not an event id; they look like 1763700000000-0", "after"};
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
    reads.push_back(redis::Command("HMGET") << keys.worker(name.text) << "info" << "heartbeat");
  }
  auto records = co_await impl->connection_->execute_all(std::move(reads), deadline);
  std::vector<WorkerInfo> out;
  for (auto& record : records) {
    if (!record) co_return record.error();
    if (record->elements.size() != 2 || record->elements[0].is_nil()) continue;  // gone meanwhile
    auto info = parse_worker(record->elements[0].text);
    if (!info) co_return info.error();
    info->heartbeat_ms = to_int(record->elements[1].text);
    out.push_back(std::move(*info));
  }
  co_return out;
}

}  // namespace ditfleet::queue
