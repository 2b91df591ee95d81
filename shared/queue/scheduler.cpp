// Client: the calls of a scheduler, except for the intake (intake.cpp).
#include <algorithm>
#include <unordered_map>
#include <utility>

#include "shared/core/json.h"
#include "shared/job/shape_class.h"
#include "shared/queue/calls.h"
#include "shared/queue/records.h"

namespace ditfleet::queue {
namespace {

constexpr std::int64_t kMailboxMs = 600'000;  // of a worker that is gone
constexpr int kPage = 500;                    // open units per call
constexpr std::size_t kMostAssigned = 32;     // per call: it reads and writes their specs, whose sizes are unknown here

std::vector<bool> flags_of(const redis::Reply& reply) {
  std::vector<bool> out;
  for (const redis::Reply& element : reply.elements) out.push_back(element.integer == 1);
  return out;
}

// The data of an `assigned` event, without the attempt.
std::string assigned_data(std::string_view owner, const std::string& reason) {
  json::object data{{"worker", worker_name(owner)}};
  if (!reason.empty()) data["reason"] = reason;
  return json::serialize(data);
}

UnitView unit_view(std::string_view member, std::string_view record, std::string_view due_ms,
                   std::string_view job_record) {
  const PackedUnit unit = parse_packed_unit(record);
  const PackedJob job = parse_packed_job(job_record);
  UnitView view;
  view.ref = parse_member(member);
  view.state = std::min(unit.shown_state(), job::State::kRunning);  // a canceling unit runs
  view.attempt = unit.attempt();
  view.lapses = unit.lapses;
  view.failed_on = split_list(unit.failed_on);
  view.owner = unit.owner;
  view.nonce = unit.nonce;
  view.not_before_ms = to_int(due_ms);
  view.tenant = job.tenant;
  view.class_key = job.class_key;
  if (auto shape = job::parse_class_key(job.class_key)) view.model = std::move(shape->model);
  view.steps = job.steps;
  view.adapters = split_list(job.adapters);
  view.created_ms = to_int(job.entry);
  view.ready_ms = job.ready_ms;
  view.cost_us = job.cost_us;
  view.priority = job.priority;
  view.deadline_ms = job.deadline_ms;
  return view;
}

}  // namespace

asio::awaitable<Result<std::int64_t>> Client::lead(const std::string& coordinator, std::int64_t ttl_ms,
                                                   Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  auto reply =
      co_await impl->call(fcall("lead", 2) << keys.leader() << keys.epoch() << coordinator << ttl_ms, deadline);
  if (!reply) co_return reply.error();
  co_return reply->integer;
}

asio::awaitable<Result<void>> Client::resign(const std::string& coordinator, std::int64_t epoch, Deadline deadline) {
  const auto impl = impl_;
  co_return without_value(
      co_await impl->call(fcall("resign", 1) << impl->keys_.leader() << coordinator << epoch, deadline));
}

asio::awaitable<Result<std::vector<bool>>> Client::assign(std::int64_t epoch, const std::string& worker_owner,
                                                          std::span<const AssignRequest> units, Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  std::vector<bool> out;
  while (!units.empty()) {
    const auto batch = units.first(std::min(units.size(), kMostAssigned));
    units = units.subspan(batch.size());
    redis::Command command = fcall("assign", 9);
    command << keys.leader() << keys.ready() << keys.lease() << keys.units() << keys.open() << keys.specs()
            << keys.last() << keys.events() << keys.mailbox(worker_owner);
    command << epoch << worker_owner << impl->options_.lease_ms << kMailboxMs;
    for (const AssignRequest& u : batch) {
      command << u.ref.job << u.ref.unit << u.nonce << assigned_data(worker_owner, u.reason)
              << packed_drops(u.drop_from_host, u.drop_from_slots);
    }
    auto reply = co_await impl->call(std::move(command), deadline);
    if (!reply) co_return reply.error();
    const auto done = flags_of(*reply);
    out.insert(out.end(), done.begin(), done.end());
  }
  co_return out;
}

asio::awaitable<Result<std::vector<bool>>> Client::revoke(std::int64_t epoch, std::span<const Attempt> units,
                                                          Deadline deadline, bool lost) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  if (units.empty()) co_return std::vector<bool>();
  redis::Command read = fcall_ro("list", 2 + units.size());
  read << keys.units() << keys.open();
  for (const Attempt& a : units) read << keys.job(a.ref.job);
  for (const Attempt& a : units) read << a.ref.job;
  const auto held = co_await impl->call(std::move(read), deadline);
  if (!held) co_return held.error();
  redis::Command command = fcall("revoke", 6 + units.size());
  command << keys.leader() << keys.lease() << keys.ready() << keys.units() << keys.last() << keys.events();
  std::vector<std::string> owners;
  for (std::size_t i = 0; i < units.size(); ++i) {
    const auto& row = held->elements.at(i).elements;
    const std::size_t at = kFirstListedUnit + static_cast<std::size_t>(units[i].ref.unit);
    owners.emplace_back(at < row.size() ? parse_packed_unit(row[at].text).owner : std::string_view());
    command << keys.mailbox(owners.back());
  }
  command << epoch << (lost ? 1 : 0);
  for (std::size_t i = 0; i < units.size(); ++i)
    command << units[i].ref.job << units[i].ref.unit << units[i].nonce << owners[i];
  auto reply = co_await impl->call(std::move(command), deadline);
  if (!reply) co_return reply.error();
  co_return flags_of(*reply);
}

asio::awaitable<Result<int>> Client::reap(std::int64_t epoch, int limit, Deadline deadline, bool hold) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  const auto asked = Deadline::Clock::now();
  auto due =
      co_await impl->call(fcall_ro("due", 3) << keys.lease() << keys.delayed() << keys.deadline() << limit, deadline);
  const bool hold_leases = impl->must_hold(asked, due.ok()) || hold;
  if (!due) co_return due.error();
  struct Item {
    const char* kind;
    UnitRef ref;
  };
  std::vector<Item> items;
  static constexpr const char* kKinds[] = {"lease", "delayed", "deadline"};
  for (std::size_t kind = 0; kind < due->elements.size() && kind < 3; ++kind) {
    if (hold && kind != 1) continue;
    for (const redis::Reply& member : due->elements[kind].elements) {
      items.push_back({kKinds[kind], kind == 2 ? UnitRef{member.text, 0} : parse_member(member.text)});
    }
  }
  for (std::string& id : std::exchange(impl->too_old_, {}))
    if (!hold) items.push_back({"age", {std::move(id), 0}});
  int touched = 0;
  // Called after each connect even if nothing is due: the first call after a restart of Redis starts the grace of the
  // leases.
  const auto generation = impl->connection_->generation();
  std::size_t begin = 0;
  while (begin < items.size() || impl->reaped_generation_ != generation) {
    const std::size_t end = std::min(items.size(), begin + kBatch);
    redis::Command command = fcall("reap", 13 + (end - begin));
    command << keys.leader() << keys.boot() << keys.lease() << keys.delayed() << keys.ready() << keys.deadline()
            << keys.dead() << keys.in() << keys.units() << keys.open() << keys.specs() << keys.last() << keys.events();
    for (std::size_t i = begin; i < end; ++i) command << keys.job(items[i].ref.job);
    // The hold time instead of the lease: how long Redis itself holds the leases after it has restarted.
    command << epoch << impl->hold_time().count() << impl->options_.max_crashes << impl->options_.max_lapses
            << (hold_leases ? 1 : 0);
    for (std::size_t i = begin; i < end; ++i) command << items[i].kind << items[i].ref.job << items[i].ref.unit;
    auto reply = co_await impl->call(std::move(command), deadline);
    if (!reply) co_return reply.error();
    touched += static_cast<int>(reply->integer);
    begin = end;
    impl->reaped_generation_ = generation;
  }
  if (!hold) co_await impl->sweep(epoch, deadline);
  co_return touched;
}

std::chrono::milliseconds Client::hold_time() const { return impl_->hold_time(); }
void Client::hold_leases() { impl_->hold_leases(); }

asio::awaitable<Result<ClockMark>> Client::clock_mark(Deadline deadline) {
  const auto impl = impl_;
  redis::Command read("HMGET");
  read << impl->keys_.clock() << "seen"
       << "held";
  auto reply = co_await impl->connection_->execute(std::move(read), deadline);
  if (!reply) co_return reply.error();
  co_return ClockMark{to_int(reply->elements.at(0).text), std::move(reply->elements.at(1).text)};
}

asio::awaitable<Result<void>> Client::set_clock_mark(const ClockMark& mark, Deadline deadline) {
  const auto impl = impl_;
  redis::Command write("HSET");
  write << impl->keys_.clock() << "seen" << mark.seen_ms << "held" << mark.held;
  co_return without_value(co_await impl->connection_->execute(std::move(write), deadline));
}

asio::awaitable<void> Client::bring_forward(std::int64_t now_ms, Deadline deadline) {
  const auto impl = impl_;
  for (const auto& [key, longest_ms] : {std::pair(impl->keys_.delayed(), impl->options_.retry_backoff_max_ms),
                                        std::pair(impl->keys_.lease(), 2 * impl->options_.lease_ms)}) {
    const std::int64_t latest = now_ms + longest_ms;
    const auto later = co_await impl->connection_->execute(redis::Command("ZRANGEBYSCORE")
                                                               << key << "(" + std::to_string(latest) << "+inf"
                                                               << "LIMIT" << 0 << 1000,
                                                           deadline);
    if (!later || later->elements.empty()) continue;
    redis::Command move("ZADD");
    move << key << "XX"
         << "LT";
    for (const redis::Reply& member : later->elements) move << latest << member.text;
    (void)co_await impl->connection_->execute(std::move(move), deadline);
  }
}

asio::awaitable<Result<std::vector<UnitView>>> Client::open_units(std::chrono::milliseconds page_limit) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  const auto generation = impl->connection_->generation();
  std::vector<UnitView> out;
  std::unordered_map<std::string, std::size_t> places;  // in `out`, by member
  std::string cursor = "0";
  do {
    const auto reply =
        co_await impl->call(fcall_ro("open", 3) << keys.units() << keys.delayed() << keys.open() << cursor << kPage,
                            Deadline::after(page_limit));
    if (!reply) co_return reply.error();
    // A cursor means nothing to a Redis that has restarted.
    if (impl->connection_->generation() != generation)
      co_return unavailable("[queue] the connection was lost while the open units were read");
    const auto& page = reply->elements;
    if (page.size() % 4 != 1) co_return internal_error("[queue] `open` did not reply with a cursor and units");
    cursor = page[0].text;
    for (std::size_t i = 1; i < page.size(); i += 4) {
      UnitView view = unit_view(page[i].text, page[i + 1].text, page[i + 2].text, page[i + 3].text);
      // A page may repeat a unit of an earlier page; its state is newer.
      const auto [place, fresh] = places.emplace(page[i].text, out.size());
      if (fresh) {
        out.push_back(std::move(view));
      } else {
        out[place->second] = std::move(view);
      }
    }
  } while (cursor != "0");
  co_return out;
}

asio::awaitable<Result<Mended>> Client::mend(std::int64_t epoch, std::chrono::milliseconds page_limit) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  Mended out;
  std::string cursor = "0";
  do {
    const auto reply =
        co_await impl->call(fcall("mend", 5) << keys.leader() << keys.units() << keys.ready() << keys.delayed()
                                             << keys.lease() << epoch << cursor << kPage << impl->options_.lease_ms,
                            Deadline::after(page_limit));
    if (!reply) co_return reply.error();
    if (reply->elements.size() != 3) co_return internal_error("[queue] `mend` did not reply with a cursor and counts");
    cursor = reply->elements[0].text;
    out.put_back += reply->elements[1].integer;
    out.unreadable += reply->elements[2].integer;
  } while (cursor != "0");
  co_return out;
}

asio::awaitable<Result<void>> Client::store_virtual_times(
    std::int64_t epoch, const std::map<std::string, std::optional<std::int64_t>>& times, Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  auto next = times.begin();
  do {
    redis::Command command = fcall("virtual_times", 2);
    command << keys.leader() << keys.tenants() << epoch;
    for (int i = 0; i < 1000 && next != times.end(); ++i, ++next)
      command << next->first << (next->second ? std::to_string(*next->second) : "");
    auto reply = co_await impl->call(std::move(command), deadline);
    if (!reply) co_return reply.error();
  } while (next != times.end());
  co_return Result<void>();
}

asio::awaitable<Result<std::map<std::string, std::int64_t>>> Client::virtual_times(Deadline deadline) {
  const auto impl = impl_;
  auto reply = co_await impl->connection_->execute(redis::Command("HGETALL") << impl->keys_.tenants(), deadline);
  if (!reply) co_return reply.error();
  std::map<std::string, std::int64_t> out;
  for (std::size_t i = 0; i + 1 < reply->elements.size(); i += 2) {
    out.emplace(reply->elements[i].text, to_int(reply->elements[i + 1].text));
  }
  co_return out;
}

}  // namespace ditfleet::queue
