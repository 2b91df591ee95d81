// Client: the calls of workers.
#include <spdlog/spdlog.h>

#include <algorithm>

#include "shared/core/ids.h"
#include "shared/core/json.h"
#include "shared/queue/calls.h"
#include "shared/queue/records.h"

namespace ditfleet::queue {
namespace {

constexpr std::int64_t kKeepWorkerMs = 60'000;  // in the registry after its last heartbeat
constexpr std::int64_t kMailboxMs = 600'000;

int jitter_permille() { return static_cast<int>(1000 * random_fraction()); }

Error not_held(const Attempt& attempt) {
  return Error{Code::kConflict,
               "[queue] unit " + attempt.ref.job + ":" + std::to_string(attempt.ref.unit) +
                   " no longer belongs to this attempt: it was revoked or canceled, or its lease has expired"};
}

}  // namespace

asio::awaitable<Result<std::string>> Client::heartbeat(const WorkerInfo& info, Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  auto reply = co_await impl->call(fcall("heartbeat", 3)
                                       << keys.workers() << keys.worker(info.name) << keys.mailbox(info.owner())
                                       << info.name << info.boot << worker_json(info) << kKeepWorkerMs << kMailboxMs,
                                   deadline);
  if (!reply) co_return reply.error();
  co_return std::move(reply->text);
}

asio::awaitable<Result<void>> Client::deregister(const std::string& name, const std::string& boot, Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  co_return without_value(co_await impl->call(
      fcall("deregister", 3) << keys.workers() << keys.worker(name) << keys.mailbox(name + ":" + boot) << name << boot,
      deadline));
}

asio::awaitable<Result<std::vector<MailboxEntry>>> Client::read_mailbox(const std::string& owner,
                                                                        const std::string& after, int limit,
                                                                        std::chrono::milliseconds block) {
  const auto impl = impl_;
  // Mail that nobody reads costs its units their leases.
  auto entries = co_await impl->read_stream(impl->mailbox_connection_, impl->keys_.mailbox(owner), after, limit, block,
                                            std::chrono::seconds(2));
  if (!entries) co_return entries.error();
  std::vector<MailboxEntry> out;
  out.reserve(entries->size());
  std::vector<std::string> unreadable;
  for (const redis::Reply& raw : *entries) {
    const auto before = static_cast<std::ptrdiff_t>(out.size());
    const auto parsed = parse_mailbox(raw, out);
    if (parsed) continue;
    out.erase(out.begin() + before, out.end());
    if (!raw.elements.empty()) unreadable.push_back(raw.elements[0].text);
    if (const auto more = impl->unreadable_mail_.admit())
      spdlog::warn("queue: skipping an entry of the mailbox of {}: {}{}", owner, parsed.error().message, *more);
  }
  // If this fails, the entries are read and skipped again.
  (void)co_await acknowledge(owner, unreadable, Deadline::after(std::chrono::seconds(5)));
  co_return out;
}

asio::awaitable<Result<void>> Client::acknowledge(const std::string& owner, std::span<const std::string> entry_ids,
                                                  Deadline deadline) {
  const auto impl = impl_;
  if (entry_ids.empty()) co_return Result<void>();
  redis::Command command("XDEL");
  command << impl->keys_.mailbox(owner);
  for (const std::string& id : entry_ids) command << id;
  co_return without_value(co_await impl->connection_->execute(std::move(command), deadline));
}

asio::awaitable<Result<void>> Client::start(const Attempt& attempt, Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  auto reply = co_await impl->call(fcall("start", 4) << keys.lease() << keys.units() << keys.last() << keys.events()
                                                     << impl->options_.lease_ms << attempt.ref.job << attempt.ref.unit
                                                     << attempt.nonce,
                                   deadline);
  if (!reply) co_return reply.error();
  if (reply->integer != 1) co_return not_held(attempt);
  co_return Result<void>();
}

asio::awaitable<Result<std::vector<RenewOutcome>>> Client::renew(std::span<const Renewal> renewals, Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  std::vector<RenewOutcome> out;
  while (!renewals.empty()) {
    const auto batch = renewals.first(std::min(renewals.size(), kBatch));
    renewals = renewals.subspan(batch.size());
    redis::Command command = fcall("renew", 4);
    command << keys.lease() << keys.units() << keys.last() << keys.events();
    command << impl->options_.lease_ms;
    for (const Renewal& r : batch) {
      command << r.attempt.ref.job << r.attempt.ref.unit << r.attempt.nonce;
      // Each step is reported once; further renewals only extend the lease.
      const auto reported = impl->last_steps_.find(r.attempt.nonce);
      if (r.step > 0 && (reported == impl->last_steps_.end() || reported->second < r.step)) {
        command << "step " + std::to_string(r.attempt.ref.unit) + " {\"step\":" + std::to_string(r.step) +
                       ",\"total\":" + std::to_string(r.total_steps) + "}";
      } else {
        command << "";
      }
    }
    auto reply = co_await impl->call(std::move(command), deadline);
    if (!reply) co_return reply.error();
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const std::int64_t code = i < reply->elements.size() ? reply->elements[i].integer : 1;
      out.push_back(code == 0 ? RenewOutcome::kOk : code == 2 ? RenewOutcome::kCancelRequested : RenewOutcome::kLost);
      if (code == 1) {
        impl->last_steps_.erase(batch[i].attempt.nonce);
      } else if (batch[i].step > 0) {
        int& last = impl->last_steps_[batch[i].attempt.nonce];
        last = std::max(last, batch[i].step);
      }
    }
  }
  co_return out;
}

asio::awaitable<Result<void>> Client::emit(const Attempt& attempt, const std::string& type,
                                           const std::map<std::string, std::string>& fields, Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  json::object data;
  for (const auto& [name, value] : fields) data[name] = value;
  co_return without_value(co_await impl->call(fcall("emit", 3)
                                                  << keys.units() << keys.last() << keys.events() << attempt.ref.job
                                                  << attempt.ref.unit << attempt.nonce << type << json::serialize(data),
                                              deadline));
}

asio::awaitable<Result<void>> Client::complete(const Completion& completion, Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  const Attempt& attempt = completion.attempt;
  json::object phases;
  for (const auto& [name, us] : completion.phases_us) phases[name] = us;
  const json::array warnings(completion.warnings.begin(), completion.warnings.end());
  redis::Command command = fcall("complete", 8);
  command << keys.lease() << keys.deadline() << keys.units() << keys.open() << keys.specs() << keys.last()
          << keys.events() << keys.job(attempt.ref.job);
  command << attempt.ref.job << attempt.ref.unit << attempt.nonce << completion.manifest << json::serialize(phases)
          << (warnings.empty() ? std::string() : json::serialize(warnings));
  auto reply = co_await impl->call(std::move(command), deadline);
  if (!reply) co_return reply.error();
  impl->last_steps_.erase(attempt.nonce);
  if (reply->integer != 1) co_return not_held(attempt);
  co_return Result<void>();
}

asio::awaitable<Result<void>> Client::fail(const Failure& failure, Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  const QueueOptions& options = impl->options_;
  const UnitRef& ref = failure.attempt.ref;
  impl->last_steps_.erase(failure.attempt.nonce);
  redis::Command command = fcall("fail", 10);
  command << keys.lease() << keys.delayed() << keys.deadline() << keys.dead() << keys.units() << keys.open()
          << keys.specs() << keys.last() << keys.events() << keys.job(ref.job);
  command << options.max_attempts << options.max_crashes << options.retry_backoff_ms << options.retry_backoff_max_ms
          << jitter_permille() << ref.job << ref.unit << failure.attempt.nonce << error_json(failure.error)
          << (failure.retryable ? 1 : 0) << (failure.crash ? 1 : 0);
  co_return without_value(co_await impl->call(std::move(command), deadline));
}

asio::awaitable<Result<void>> Client::hand_back(std::span<const Attempt> attempts, Deadline deadline) {
  const auto impl = impl_;
  if (attempts.empty()) co_return Result<void>();
  const Keys& keys = impl->keys_;
  redis::Command command = fcall("hand_back", 8 + attempts.size());
  command << keys.lease() << keys.ready() << keys.deadline() << keys.units() << keys.open() << keys.specs()
          << keys.last() << keys.events();
  for (const Attempt& a : attempts) command << keys.job(a.ref.job);
  for (const Attempt& a : attempts) {
    command << a.ref.job << a.ref.unit << a.nonce;
    impl->last_steps_.erase(a.nonce);
  }
  // A unit that is no longer held needs no handing back.
  co_return without_value(co_await impl->call(std::move(command), deadline));
}

asio::awaitable<Result<bool>> Client::hold(const Attempt& attempt, Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  redis::Command command = fcall("hold", 4);
  command << keys.lease() << keys.units() << keys.last() << keys.events() << attempt.ref.job << attempt.ref.unit
          << attempt.nonce;
  const auto reply = co_await impl->call(std::move(command), deadline);
  if (!reply) co_return reply.error();
  if (reply->integer == 1) impl->last_steps_.erase(attempt.nonce);
  co_return reply->integer == 1;
}

asio::awaitable<Result<void>> Client::canceled(const Attempt& attempt, Deadline deadline) {
  const auto impl = impl_;
  const Keys& keys = impl->keys_;
  impl->last_steps_.erase(attempt.nonce);
  co_return without_value(co_await impl->call(
      fcall("canceled", 8) << keys.lease() << keys.deadline() << keys.units() << keys.open() << keys.specs()
                           << keys.last() << keys.events() << keys.job(attempt.ref.job) << attempt.ref.job
                           << attempt.ref.unit << attempt.nonce,
      deadline));
}

asio::awaitable<Result<void>> Client::store_checkpoint(const Attempt& attempt, const std::string& text,
                                                       Deadline deadline) {
  const auto impl = impl_;
  redis::Command command = fcall("store_checkpoint", 2);
  command << impl->keys_.units() << impl->keys_.checkpoint(attempt.ref.job, attempt.ref.unit)
          << impl->options_.retention_ms << attempt.ref.job << attempt.ref.unit << attempt.nonce << text;
  const auto reply = co_await impl->call(std::move(command), deadline);
  if (!reply) co_return reply.error();
  if (reply->integer != 1) co_return Error{Code::kConflict, "[queue] the unit does not run under this nonce"};
  co_return Result<void>();
}

asio::awaitable<Result<void>> Client::give_checkpoint(const UnitRef& unit, const std::string& text, Deadline deadline) {
  const auto impl = impl_;
  redis::Command command("SET");
  command << impl->keys_.checkpoint(unit.job, unit.unit) << text << "PX" << impl->options_.retention_ms;
  co_return without_value(co_await impl->connection_->execute(std::move(command), deadline));
}

asio::awaitable<Result<std::string>> Client::checkpoint(const UnitRef& unit, Deadline deadline) {
  const auto impl = impl_;
  redis::Command command("GET");
  command << impl->keys_.checkpoint(unit.job, unit.unit);
  auto reply = co_await impl->connection_->execute(std::move(command), deadline);
  if (!reply) co_return reply.error();
  co_return reply->is_nil() ? std::string() : std::move(reply->text);
}

asio::awaitable<Result<bool>> Client::is_open(const UnitRef& unit, Deadline deadline) {
  const auto impl = impl_;
  redis::Command command("HEXISTS");
  command << impl->keys_.units() << unit.job + ":" + std::to_string(unit.unit);
  const auto reply = co_await impl->connection_->execute(std::move(command), deadline);
  if (!reply) co_return reply.error();
  co_return reply->integer == 1;
}

asio::awaitable<Result<void>> Client::drop_checkpoint(const UnitRef& unit, Deadline deadline) {
  const auto impl = impl_;
  redis::Command command("DEL");
  command << impl->keys_.checkpoint(unit.job, unit.unit);
  co_return without_value(co_await impl->connection_->execute(std::move(command), deadline));
}

asio::awaitable<Result<std::vector<std::string>>> Client::keep_checkpoints(Deadline deadline) {
  const auto impl = impl_;
  const auto paused = co_await impl->connection_->execute(redis::Command("SMEMBERS") << impl->keys_.paused(), deadline);
  if (!paused) co_return paused.error();
  std::vector<redis::Command> reads;
  for (const redis::Reply& member : paused->elements) {
    if (member.text.find(':') == std::string::npos) continue;  // a job
    const UnitRef unit = parse_member(member.text);
    reads.push_back(redis::Command("GETEX")
                    << impl->keys_.checkpoint(unit.job, unit.unit) << "PX" << impl->options_.retention_ms);
  }
  std::vector<std::string> texts;
  if (reads.empty()) co_return texts;
  auto replies = co_await impl->connection_->execute_all(std::move(reads), deadline);
  for (auto& reply : replies) {
    if (!reply) co_return reply.error();
    if (!reply->is_nil()) texts.push_back(std::move(reply->text));
  }
  co_return texts;
}

}  // namespace ditfleet::queue
