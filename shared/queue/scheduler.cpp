// Client: what the scheduler of a shard does.
#include <algorithm>

#include "shared/core/bytes.h"
#include "shared/core/json.h"
#include "shared/job/validate.h"
#include "shared/queue/calls.h"
#include "shared/queue/records.h"

namespace ditfleet::queue {
namespace {

constexpr std::int64_t kMailboxMs = 600'000;  // of a worker that went away without a word

std::vector<bool> flags_of(const redis::Reply& reply) {
  std::vector<bool> out;
  for (const redis::Reply& element : reply.elements) out.push_back(element.integer == 1);
  return out;
}

// The id of an entry that chose none.
std::string own_id(const std::string& entry_id) { return "x-" + entry_id; }

// What a repeated idempotency key is compared by: the spec as the gateway stores it, so that the key means the
// same job over HTTP and by XADD.
std::string body_hash(const std::string& spec) {
  const auto parsed = job::parse_spec(spec);
  return sha256_hex(parsed ? job::to_json(*parsed) : spec);
}

// What the event of an assignment says of it: members of a JSON object.
std::string assigned_data(const std::string& owner, const std::string& reason) {
  std::string data = "\"worker\":" + json::serialize(json::string(owner.substr(0, owner.find(':'))));
  if (!reason.empty()) data += ",\"reason\":" + json::serialize(json::string(reason));
  return data;
}

std::string model_of(std::string_view spec) {
  const auto value = parse_json(spec);
  if (!value || !value->is_object()) return {};
  const json::value* model = value->get_object().if_contains("model");
  return model != nullptr && model->is_string() ? std::string(model->get_string()) : std::string();
}

}  // namespace

asio::awaitable<Result<std::int64_t>> Client::lead(const std::string& coordinator, std::int64_t ttl_ms, Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  auto reply = co_await impl->call(fcall("lead", 2) << keys.leader() << keys.epoch() << coordinator << ttl_ms, deadline);
  if (!reply) co_return reply.error();
  co_return reply->integer;
}

asio::awaitable<Result<void>> Client::resign(const std::string& coordinator, std::int64_t epoch, Deadline deadline) {
  const auto impl = impl_;
  auto reply = co_await impl->call(fcall("resign", 1) << impl->keys_.leader() << coordinator << epoch, deadline);
  if (!reply) co_return reply.error();
  co_return Result<void>();
}

asio::awaitable<Result<std::vector<IntakeEntry>>> Client::read_intake(int limit, std::chrono::milliseconds block) {
  const auto impl = impl_;
  const int count = std::max(1, limit / static_cast<int>(impl->jobs_an_entry_));
  auto entries = co_await impl->read_stream(impl->intake_connection_, impl->keys_.in(), impl->intake_cursor_, count, block);
  if (!entries) co_return entries.error();
  std::vector<IntakeEntry> out;
  for (const redis::Reply& raw : *entries) {
    auto jobs = parse_intake(raw);
    impl->expect(jobs);
    for (IntakeEntry& entry : jobs) {
      if (entry.raw) impl->raw_bodies_[entry.entry_id] = body_hash(entry.spec);
      impl->intake_cursor_ = stream_id(entry.entry_id);
      out.push_back(std::move(entry));
    }
  }
  if (!entries->empty()) impl->jobs_an_entry_ = out.size() / entries->size();
  co_return out;
}

void Client::rewind_intake() {
  impl_->intake_cursor_ = "0";
  impl_->raw_bodies_.clear();
  impl_->shared_entries_.clear();
}

asio::awaitable<Result<void>> Client::admit(std::int64_t epoch, std::span<const Admission> admissions, Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  std::vector<const Admission*> submitted, raw;
  for (const Admission& a : admissions) (a.raw ? raw : submitted).push_back(&a);
  const auto common = [](redis::Command& command, const Admission& a) {
    command << a.entry_id << a.id << a.units << a.spec << a.class_key << packed_batch(a.batch_key, a.adapters) << a.cost_us << a.priority << a.deadline_ms;
  };

  for (std::size_t begin = 0; begin < submitted.size(); begin += kBatch) {
    const std::size_t end = std::min(submitted.size(), begin + kBatch);
    redis::Command command = fcall("admit", 9);
    command << keys.leader() << keys.in() << keys.ready() << keys.deadline() << keys.units() << keys.open() << keys.specs() << keys.last() << keys.events() << epoch;
    std::vector<std::string_view> entries;
    for (std::size_t i = begin; i < end; ++i) {
      common(command, *submitted[i]);
      entries.push_back(submitted[i]->entry_id);
    }
    auto reply = co_await impl->call(std::move(command), deadline);
    if (!reply) co_return reply.error();
    impl->seen_to(entries, deadline);
  }

  std::vector<Rejection> refused;
  for (std::size_t begin = 0; begin < raw.size(); begin += kBatch) {
    const std::size_t end = std::min(raw.size(), begin + kBatch);
    redis::Command command = fcall("admit_raw", 10 + 2 * (end - begin));
    command << keys.leader() << keys.in() << keys.ready() << keys.deadline() << keys.units() << keys.open() << keys.specs() << keys.last() << keys.events() << keys.jobs();
    for (std::size_t i = begin; i < end; ++i) {
      const Admission& a = *raw[i];
      const std::string job = keys.job(a.id);
      command << job << (a.idempotency_key.empty() ? job : keys.idempotency(a.tenant, a.idempotency_key));
    }
    command << epoch << impl->options_.idempotency_ms << impl->options_.retention_ms;
    for (std::size_t i = begin; i < end; ++i) {
      const Admission& a = *raw[i];
      const auto body = impl->raw_bodies_.find(a.entry_id);
      common(command, a);
      command << a.tenant << a.traceparent << (body != impl->raw_bodies_.end() ? body->second : sha256_hex(a.spec))
              << (a.idempotency_key.empty() ? 0 : 1);
    }
    auto reply = co_await impl->call(std::move(command), deadline);
    if (!reply) co_return reply.error();
    for (std::size_t i = begin; i < end; ++i) {
      const Admission& a = *raw[i];
      impl->raw_bodies_.erase(a.entry_id);
      const std::string verdict = i - begin < reply->elements.size() ? reply->elements[i - begin].text : std::string();
      if (verdict != "taken" && !verdict.starts_with("mismatch ")) continue;
      Error why = verdict == "taken"
                      ? Error{Code::kConflict, "[queue] the id " + a.id + " is taken by another job"}
                      : Error{Code::kIdempotencyMismatch, "[queue] the idempotency key was used for job " + verdict.substr(9) +
                                                              " with another body; use a fresh key for a new job"};
      // The chosen id names somebody else's job: this entry's fate is told under its own.
      refused.push_back({a.entry_id, verdict == "taken" ? own_id(a.entry_id) : a.id, std::move(why), true, a.tenant, a.spec, a.traceparent});
    }
  }
  if (!refused.empty()) co_return co_await reject(epoch, refused, deadline);
  co_return Result<void>();
}

asio::awaitable<Result<void>> Client::reject(std::int64_t epoch, std::span<const Rejection> rejections, Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  constexpr std::size_t kKeptSpec = 65536;  // of an entry nobody may have checked
  while (!rejections.empty()) {
    const auto batch = rejections.first(std::min(rejections.size(), kBatch));
    rejections = rejections.subspan(batch.size());
    redis::Command command = fcall("reject", 8 + batch.size());
    command << keys.leader() << keys.in() << keys.jobs() << keys.deadline() << keys.open() << keys.specs() << keys.last() << keys.events();
    for (const Rejection& r : batch) command << keys.job(r.id);
    command << epoch;
    for (const Rejection& r : batch) {
      command << r.entry_id << r.id << (r.raw ? 1 : 0) << error_json(r.error) << r.tenant << r.spec.substr(0, kKeptSpec) << r.traceparent;
      impl->raw_bodies_.erase(r.entry_id);
    }
    auto reply = co_await impl->call(std::move(command), deadline);
    if (!reply) co_return reply.error();
    std::vector<std::string_view> entries;
    for (const Rejection& r : batch) entries.push_back(r.entry_id);
    impl->seen_to(entries, deadline);
    // A chosen id that names another job: this entry's fate is told under its own.
    for (std::size_t i = 0; i < batch.size() && i < reply->elements.size(); ++i) {
      if (reply->elements[i].integer == 1 || batch[i].id == own_id(batch[i].entry_id)) continue;
      Rejection again = batch[i];
      again.id = own_id(again.entry_id);
      if (auto done = co_await reject(epoch, std::span(&again, 1), deadline); !done) co_return done.error();
    }
  }
  co_return Result<void>();
}

asio::awaitable<Result<std::vector<bool>>> Client::assign(std::int64_t epoch, const std::string& worker_owner,
                                                          std::span<const AssignRequest> units, Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  std::vector<bool> out;
  while (!units.empty()) {
    const auto batch = units.first(std::min(units.size(), kBatch));
    units = units.subspan(batch.size());
    redis::Command command = fcall("assign", 9);
    command << keys.leader() << keys.ready() << keys.lease() << keys.units() << keys.open() << keys.specs() << keys.last() << keys.events() << keys.mailbox(worker_owner);
    command << epoch << worker_owner << impl->options_.lease_ms << kMailboxMs;
    for (const AssignRequest& u : batch) {
      command << u.ref.job << u.ref.unit << u.nonce << assigned_data(worker_owner, u.reason) << packed_drops(u.drop_from_host, u.drop_from_slots);
    }
    auto reply = co_await impl->call(std::move(command), deadline);
    if (!reply) co_return reply.error();
    const auto done = flags_of(*reply);
    out.insert(out.end(), done.begin(), done.end());
  }
  co_return out;
}

asio::awaitable<Result<std::vector<bool>>> Client::dispatch(std::int64_t epoch, std::span<const Dispatch> jobs, Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  std::vector<bool> out;
  while (!jobs.empty()) {
    const auto batch = jobs.first(std::min(jobs.size(), kBatch));
    jobs = jobs.subspan(batch.size());
    std::vector<std::string_view> owners;
    const auto place_of = [&owners](std::string_view owner) {
      const auto it = std::find(owners.begin(), owners.end(), owner);
      if (it != owners.end()) return it - owners.begin() + 1;
      owners.push_back(owner);
      return static_cast<std::ptrdiff_t>(owners.size());
    };
    for (const Dispatch& d : batch) {
      for (const auto& p : d.placements) place_of(p.owner);
    }
    redis::Command command = fcall("dispatch", 10 + owners.size());
    command << keys.leader() << keys.in() << keys.ready() << keys.deadline() << keys.lease() << keys.units() << keys.open() << keys.specs() << keys.last() << keys.events();
    for (const auto owner : owners) command << keys.mailbox(owner);
    command << epoch << impl->options_.lease_ms << kMailboxMs << static_cast<std::int64_t>(owners.size());
    for (const auto owner : owners) command << owner;
    for (const Dispatch& d : batch) {
      const Admission& a = d.admission;
      command << a.entry_id << a.id << a.units << a.spec
              << std::to_string(a.cost_us) + '|' + std::to_string(a.priority) + '|' + std::to_string(a.deadline_ms)
              << a.class_key + '|' + packed_batch(a.batch_key, a.adapters) << static_cast<std::int64_t>(d.placements.size());
      for (const auto& p : d.placements) {
        command << p.unit.ref.unit << static_cast<std::int64_t>(place_of(p.owner)) << p.unit.nonce << assigned_data(p.owner, p.unit.reason)
                << packed_drops(p.unit.drop_from_host, p.unit.drop_from_slots);
      }
    }
    auto reply = co_await impl->call(std::move(command), deadline);
    if (!reply) co_return reply.error();
    const auto done = flags_of(*reply);
    out.insert(out.end(), done.begin(), done.end());
    std::vector<std::string_view> entries;
    for (const Dispatch& d : batch) entries.push_back(d.admission.entry_id);
    impl->seen_to(entries, deadline);
  }
  co_return out;
}

asio::awaitable<Result<std::vector<bool>>> Client::revoke(std::int64_t epoch, std::span<const Attempt> units, Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  if (units.empty()) co_return std::vector<bool>();
  redis::Command read("HMGET");
  read << keys.units();
  for (const Attempt& a : units) read << a.ref.job + ":" + std::to_string(a.ref.unit);
  auto held = co_await impl->connection_->execute(std::move(read), deadline);
  if (!held) co_return held.error();
  redis::Command command = fcall("revoke", 6 + units.size());
  command << keys.leader() << keys.lease() << keys.ready() << keys.units() << keys.last() << keys.events();
  std::vector<std::string> owners;
  for (std::size_t i = 0; i < units.size(); ++i) {
    owners.emplace_back(parse_packed_unit(held->elements.at(i).text).owner);
    command << keys.mailbox(owners.back());
  }
  command << epoch;
  for (std::size_t i = 0; i < units.size(); ++i) command << units[i].ref.job << units[i].ref.unit << units[i].nonce << owners[i];
  auto reply = co_await impl->call(std::move(command), deadline);
  if (!reply) co_return reply.error();
  co_return flags_of(*reply);
}

asio::awaitable<Result<int>> Client::reap(std::int64_t epoch, int limit, Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  const bool hold = impl->hold_leases();
  auto due = co_await impl->call(fcall_ro("due", 3) << keys.lease() << keys.delayed() << keys.deadline() << limit, deadline);
  if (!due) co_return due.error();
  struct Item {
    const char* kind;
    UnitRef ref;
  };
  std::vector<Item> items;
  static constexpr const char* kKinds[] = {"lease", "delayed", "deadline"};
  for (std::size_t kind = 0; kind < due->elements.size() && kind < 3; ++kind) {
    for (const redis::Reply& member : due->elements[kind].elements) {
      items.push_back({kKinds[kind], kind == 2 ? UnitRef{member.text, 0} : parse_member(member.text)});
    }
  }
  int touched = 0;
  // Also with nothing due: the first call after a restart of Redis starts the workers' grace.
  std::size_t begin = 0;
  do {
    const std::size_t end = std::min(items.size(), begin + kBatch);
    redis::Command command = fcall("reap", 13 + (end - begin));
    command << keys.leader() << keys.boot() << keys.lease() << keys.delayed() << keys.ready() << keys.deadline() << keys.dead() << keys.in()
            << keys.units() << keys.open() << keys.specs() << keys.last() << keys.events();
    for (std::size_t i = begin; i < end; ++i) command << keys.job(items[i].ref.job);
    command << epoch << impl->options_.lease_ms << impl->options_.max_crashes << (hold ? 1 : 0);
    for (std::size_t i = begin; i < end; ++i) command << items[i].kind << items[i].ref.job << items[i].ref.unit;
    auto reply = co_await impl->call(std::move(command), deadline);
    if (!reply) co_return reply.error();
    touched += static_cast<int>(reply->integer);
    begin = end;
  } while (begin < items.size());
  co_await impl->sweep(deadline);
  co_return touched;
}

asio::awaitable<Result<std::vector<UnitView>>> Client::open_units(Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  auto sets = co_await impl->call(fcall_ro("open", 4) << keys.units() << keys.delayed() << keys.lease() << keys.open(), deadline);
  if (!sets) co_return sets.error();
  if (sets->elements.size() != 4) co_return internal_error("[queue] ditfleet_v1_open did not answer with four lists");
  const auto scores_of = [](const redis::Reply& flat) {
    std::map<std::string_view, std::int64_t> scores;
    for (std::size_t i = 0; i + 1 < flat.elements.size(); i += 2) scores.emplace(flat.elements[i].text, to_int(flat.elements[i + 1].text));
    return scores;
  };
  const auto not_before = scores_of(sets->elements[1]), lease_until = scores_of(sets->elements[2]);

  std::vector<UnitView> out;
  std::map<std::string, std::vector<std::size_t>> of_job;  // places in `out`
  const auto& flat = sets->elements[0].elements;
  for (std::size_t i = 0; i + 1 < flat.size(); i += 2) {
    const PackedUnit unit = parse_packed_unit(flat[i + 1].text);
    UnitView view;
    view.ref = parse_member(flat[i].text);
    view.state = unit.shown_state();
    view.attempt = unit.attempt();
    view.crashes = unit.crashes;
    view.owner = unit.owner;
    view.nonce = unit.nonce;
    if (const auto it = not_before.find(flat[i].text); it != not_before.end()) view.not_before_ms = it->second;
    if (const auto it = lease_until.find(flat[i].text); it != lease_until.end()) view.lease_until_ms = it->second;
    of_job[view.ref.job].push_back(out.size());
    out.push_back(std::move(view));
  }
  // The rest is the jobs'.
  std::vector<std::string> jobs;
  const auto& open = sets->elements[3].elements;
  for (std::size_t i = 0; i + 1 < open.size(); i += 2) {
    const auto places = of_job.find(open[i].text);
    if (places == of_job.end()) continue;  // queued
    jobs.push_back(open[i].text);
    const PackedJob job = parse_packed_job(open[i + 1].text);
    for (const std::size_t place : places->second) {
      UnitView& view = out[place];
      view.tenant = job.tenant;
      view.class_key = job.class_key;
      view.batch_key = job.batch_key;
      view.adapters = split_adapters(job.adapters);
      view.created_ms = to_int(job.entry);
      view.ready_ms = job.ready_ms;
      view.cost_us = job.cost_us;
      view.priority = job.priority;
      view.deadline_ms = job.deadline_ms;
    }
  }
  // Specs may be long: a page of them at a time. One whose job ended since is gone, and so will be its units.
  for (std::size_t begin = 0; begin < jobs.size(); begin += kBatch) {
    const std::size_t end = std::min(jobs.size(), begin + kBatch);
    redis::Command read("HMGET");
    read << keys.specs();
    for (std::size_t i = begin; i < end; ++i) read << jobs[i];
    auto specs = co_await impl->connection_->execute(std::move(read), deadline);
    if (!specs) co_return specs.error();
    for (std::size_t i = begin; i < end; ++i) {
      const std::string model = model_of(specs->elements.at(i - begin).text);
      for (const std::size_t place : of_job.at(jobs[i])) out[place].model = model;
    }
  }
  co_return out;
}

asio::awaitable<Result<void>> Client::store_virtual_times(std::int64_t epoch, const std::map<std::string, std::int64_t>& times,
                                                          Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  auto next = times.begin();
  do {
    redis::Command command = fcall("virtual_times", 2);
    command << keys.leader() << keys.tenants() << epoch;
    for (int i = 0; i < 1000 && next != times.end(); ++i, ++next) command << next->first << next->second;
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
