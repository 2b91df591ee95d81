// Client: reading, admitting and rejecting what waits in the intake.
#include <algorithm>
#include <chrono>

#include "shared/core/bytes.h"
#include "shared/job/validate.h"
#include "shared/queue/calls.h"
#include "shared/queue/records.h"

namespace ditfleet::queue {
namespace {

constexpr std::size_t kKeptSpec = 65536;  // bytes of a rejected spec, which may not have been checked

// The id of the job of an entry that chose none.
std::string own_id(const std::string& entry_id) { return "x-" + entry_id; }

// The time in an entry's id, which its producer may have chosen; `now` if that is not in the past.
std::int64_t past_time(std::int64_t ms, std::int64_t now) { return ms <= 0 || ms > now ? now : ms; }

// Hash of the spec as the gateway stores it: an idempotency key names the same job over HTTP and by XADD.
std::string body_hash(const std::string& spec) {
  const auto parsed = job::parse_spec(spec);
  return sha256_hex(parsed ? job::to_json(*parsed) : spec);
}

}  // namespace

asio::awaitable<Result<std::vector<IntakeEntry>>> Client::read_intake(int limit, std::chrono::milliseconds block) {
  const auto impl = impl_;
  auto entries = co_await impl->read_stream(impl->intake_connection_, impl->keys_.in(), impl->intake_cursor_, limit,
                                            block, std::chrono::seconds(5));
  if (!entries) co_return entries.error();
  std::vector<IntakeEntry> out;
  if (entries->empty()) co_return out;
  if (!impl->estimated_time()) {  // later, each sweep updates it
    const auto asked = co_await impl->redis_time(Deadline::after(std::chrono::seconds(5)));
    if (!asked) co_return asked.error();
  }
  const std::int64_t now = *impl->estimated_time();
  for (const redis::Reply& raw : *entries) {
    IntakeEntry& entry = out.emplace_back(parse_intake(raw));
    entry.created_ms = past_time(entry.created_ms, now);
    if (entry.raw) impl->raw_bodies_[entry.entry_id] = body_hash(entry.spec);
    impl->intake_cursor_ = entry.entry_id;
  }
  co_return out;
}

void Client::rewind_intake() {
  impl_->intake_cursor_ = "0";
  impl_->raw_bodies_.clear();
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

  const auto spec_bytes = [](const Admission* a) { return a->spec.size(); };
  for (std::size_t begin = 0, end = 0; begin < submitted.size(); begin = end) {
    end = batch_end(submitted, begin, spec_bytes);
    redis::Command command = fcall("admit", 9);
    command << keys.leader() << keys.in() << keys.ready() << keys.deadline() << keys.units() << keys.open()
            << keys.specs() << keys.last() << keys.events() << epoch;
    for (std::size_t i = begin; i < end; ++i) common(command, *submitted[i]);
    auto reply = co_await impl->call(std::move(command), deadline);
    if (!reply) co_return reply.error();
    for (std::size_t i = begin; i < end && i - begin < reply->elements.size(); ++i) {
      const Admission& a = *submitted[i];
      if (reply->elements[i - begin].integer < 0)  // the job has just ended, or the entry came by XADD
        refused.push_back({a.entry_id, a.id, imitation_of_submit(), false, a.tenant, a.spec, a.traceparent});
    }
  }

  for (std::size_t begin = 0, end = 0; begin < raw.size(); begin = end) {
    end = batch_end(raw, begin, spec_bytes);
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
      command << impl->quota(a.tenant).packed();
    }
    auto reply = co_await impl->call(std::move(command), deadline);
    if (!reply) co_return reply.error();
    for (std::size_t i = begin; i < end; ++i) {
      const Admission& a = *raw[i];
      impl->raw_bodies_.erase(a.entry_id);
      const std::string verdict = i - begin < reply->elements.size() ? reply->elements[i - begin].text : std::string();
      const auto why = refusal_of(verdict, a.id, a.tenant, impl->quota(a.tenant), a.units, a.spec.size());
      if (!why) continue;
      // A chosen id that names another job: the rejection becomes a job of its own.
      refused.push_back(
          {a.entry_id, verdict == "taken" ? own_id(a.entry_id) : a.id, *why, true, a.tenant, a.spec, a.traceparent});
    }
  }
  if (!refused.empty()) co_return co_await reject(epoch, refused, deadline);
  co_return Result<void>();
}

asio::awaitable<Result<void>> Client::reject(std::int64_t epoch, std::span<const Rejection> rejections,
                                             Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  while (!rejections.empty()) {
    const auto kept_bytes = [](const Rejection& r) { return std::min(r.spec.size(), kKeptSpec); };
    const auto batch = rejections.first(batch_end(rejections, 0, kept_bytes));
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
    for (std::size_t i = 0; i < batch.size() && i < reply->elements.size(); ++i) {
      if (reply->elements[i].integer == 2) continue;  // another version must read it
      if (reply->elements[i].integer == 1) {
        // The ids of the intake start anew below the last one.
        if (is_last_entry(batch[i].entry_id)) impl->intake_cursor_ = "0";
        continue;
      }
      if (batch[i].raw && batch[i].id == own_id(batch[i].entry_id)) continue;
      // The entry chose the id of another job, or looks like a submitted one: its rejection becomes a job of its own.
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
