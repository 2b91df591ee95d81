// Client: the intake, as the scheduler of a shard reads it: what is admitted, what is rejected.
#include <algorithm>
#include <chrono>

#include "shared/core/bytes.h"
#include "shared/job/validate.h"
#include "shared/queue/calls.h"
#include "shared/queue/records.h"

namespace ditfleet::queue {
namespace {

// The id of an entry that chose none; of one that looks like several jobs', "x-<entry>.<which>".
std::string own_id(std::string entry_id) {
  std::replace(entry_id.begin(), entry_id.end(), '/', '.');
  return "x-" + entry_id;
}

// What the producer may have chosen (the entry's id), as a time that has been by Redis' clock.
std::int64_t time_that_has_been(std::int64_t ms, std::int64_t now) { return ms <= 0 || ms > now ? now : ms; }

// What a repeated idempotency key is compared by: the spec as the gateway stores it, so that the key means the
// same job over HTTP and by XADD.
std::string body_hash(const std::string& spec) {
  const auto parsed = job::parse_spec(spec);
  return sha256_hex(parsed ? job::to_json(*parsed) : spec);
}

}  // namespace

Rejection stray(const Admission& a) {
  return {a.entry_id, a.id, imitation_of_submit(), false, a.tenant, a.spec, a.traceparent};
}

asio::awaitable<Result<std::vector<IntakeEntry>>> Client::read_intake(int limit, std::chrono::milliseconds block) {
  const auto impl = impl_;
  const int count = std::max(1, limit / static_cast<int>(impl->jobs_an_entry_));
  auto entries =
      co_await impl->read_stream(impl->intake_connection_, impl->keys_.in(), impl->intake_cursor_, count, block);
  if (!entries) co_return entries.error();
  std::vector<IntakeEntry> out;
  if (entries->empty()) co_return out;
  if (!impl->reckoned_time()) {  // later each sweep asks anew
    const auto asked = co_await impl->redis_time(Deadline::after(std::chrono::seconds(5)));
    if (!asked) co_return asked.error();
  }
  const std::int64_t now = *impl->reckoned_time();
  for (const redis::Reply& raw : *entries) {
    auto jobs = parse_intake(raw);
    impl->expect(jobs);
    for (IntakeEntry& entry : jobs) {
      entry.created_ms = time_that_has_been(entry.created_ms, now);
      if (entry.raw) impl->raw_bodies_[entry.entry_id] = body_hash(entry.spec);
      impl->intake_cursor_ = stream_id(entry.entry_id);
      out.push_back(std::move(entry));
    }
  }
  impl->jobs_an_entry_ = out.size() / entries->size();
  co_return out;
}

void Client::rewind_intake() {
  impl_->intake_cursor_ = "0";
  impl_->raw_bodies_.clear();
  impl_->shared_entries_.clear();
}

asio::awaitable<Result<void>> Client::admit(std::int64_t epoch, std::span<const Admission> admissions,
                                            Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  std::vector<const Admission*> submitted, raw;
  for (const Admission& a : admissions) (a.raw ? raw : submitted).push_back(&a);
  std::vector<Rejection> refused;
  const auto common = [](redis::Command& command, const Admission& a) {
    command << a.entry_id << a.id << a.units << a.spec << a.class_key << packed_needs(a.steps, a.adapters) << a.cost_us
            << a.priority << a.deadline_ms;
  };

  for (std::size_t begin = 0; begin < submitted.size(); begin += kBatch) {
    const std::size_t end = std::min(submitted.size(), begin + kBatch);
    redis::Command command = fcall("admit", 9);
    command << keys.leader() << keys.in() << keys.ready() << keys.deadline() << keys.units() << keys.open()
            << keys.specs() << keys.last() << keys.events() << epoch;
    for (std::size_t i = begin; i < end; ++i) common(command, *submitted[i]);
    auto reply = co_await impl->call(std::move(command), deadline);
    if (!reply) co_return reply.error();
    std::vector<std::string_view> entries;
    for (std::size_t i = begin; i < end && i - begin < reply->elements.size(); ++i) {
      if (reply->elements[i - begin].integer < 0)
        refused.push_back(stray(*submitted[i]));
      else
        entries.push_back(submitted[i]->entry_id);
    }
    impl->seen_to(entries, deadline);
  }

  for (std::size_t begin = 0; begin < raw.size(); begin += kBatch) {
    const std::size_t end = std::min(raw.size(), begin + kBatch);
    redis::Command command = fcall("admit_raw", 10 + 2 * (end - begin));
    command << keys.leader() << keys.in() << keys.ready() << keys.deadline() << keys.units() << keys.open()
            << keys.specs() << keys.last() << keys.events() << keys.jobs();
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
      Error why = verdict == "taken" ? Error{Code::kConflict, "[queue] the id " + a.id + " is taken by another job"}
                                     : Error{Code::kIdempotencyMismatch,
                                             "[queue] the idempotency key was used for job " + verdict.substr(9) +
                                                 " with another body; use a fresh key for a new job"};
      // The chosen id names somebody else's job: this entry's fate is told under its own.
      refused.push_back({a.entry_id, verdict == "taken" ? own_id(a.entry_id) : a.id, std::move(why), true, a.tenant,
                         a.spec, a.traceparent});
    }
  }
  if (!refused.empty()) co_return co_await reject(epoch, refused, deadline);
  co_return Result<void>();
}

asio::awaitable<Result<void>> Client::reject(std::int64_t epoch, std::span<const Rejection> rejections,
                                             Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  constexpr std::size_t kKeptSpec = 65536;  // of an entry nobody may have checked
  while (!rejections.empty()) {
    const auto batch = rejections.first(std::min(rejections.size(), kBatch));
    rejections = rejections.subspan(batch.size());
    redis::Command command = fcall("reject", 8 + batch.size());
    command << keys.leader() << keys.in() << keys.jobs() << keys.deadline() << keys.open() << keys.specs()
            << keys.last() << keys.events();
    for (const Rejection& r : batch) command << keys.job(r.id);
    command << epoch;
    for (const Rejection& r : batch) {
      command << r.entry_id << r.id << (r.raw ? 1 : 0) << error_json(r.error) << r.tenant << r.spec.substr(0, kKeptSpec)
              << r.traceparent;
      impl->raw_bodies_.erase(r.entry_id);
    }
    auto reply = co_await impl->call(std::move(command), deadline);
    if (!reply) co_return reply.error();
    std::vector<std::string_view> entries;
    for (std::size_t i = 0; i < batch.size() && i < reply->elements.size(); ++i) {
      if (reply->elements[i].integer == 1) entries.push_back(batch[i].entry_id);
    }
    impl->seen_to(entries, deadline);
    // A chosen id that names another job, or an entry that looks like a submitted one: its fate is told under its own
    // id.
    for (std::size_t i = 0; i < batch.size() && i < reply->elements.size(); ++i) {
      if (reply->elements[i].integer == 1 || (batch[i].raw && batch[i].id == own_id(batch[i].entry_id))) continue;
      Rejection again = batch[i];
      if (!again.raw) again.error = imitation_of_submit();
      again.id = own_id(again.entry_id);
      again.raw = true;
      if (auto done = co_await reject(epoch, std::span(&again, 1), deadline); !done) co_return done.error();
    }
  }
  co_return Result<void>();
}

}  // namespace ditfleet::queue
