#include "shared/queue/calls.h"

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>

#include "shared/queue/library.h"
#include "shared/queue/records.h"

namespace ditfleet::queue {
namespace {

std::int64_t monotonic_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(Deadline::Clock::now().time_since_epoch()).count();
}

}  // namespace

redis::Command fcall(std::string_view name, std::size_t keys) {
  redis::Command command("FCALL");
  command << "ditfleet_v1_" + std::string(name) << static_cast<std::int64_t>(keys);
  return command;
}

redis::Command fcall_ro(std::string_view name, std::size_t keys) {
  redis::Command command("FCALL_RO");
  command << "ditfleet_v1_" + std::string(name) << static_cast<std::int64_t>(keys);
  return command;
}

Client::Impl::Impl(std::shared_ptr<redis::Connection> connection, QueueOptions options)
    : connection_(std::move(connection)), options_(options), keys_(options.shard) {}

Client::Impl::~Impl() {
  if (intake_connection_) intake_connection_->stop();
  if (mailbox_connection_) mailbox_connection_->stop();
}

asio::awaitable<Result<redis::Reply>> Client::Impl::call(redis::Command command, Deadline deadline) {
  auto reply = co_await connection_->execute(command, deadline);
  if (reply || reply.error().kind != "NOFUNCTION") co_return reply;
  if (auto loaded = co_await load(deadline); !loaded) co_return loaded.error();
  co_return co_await connection_->execute(std::move(command), deadline);
}

asio::awaitable<Result<void>> Client::Impl::load(Deadline deadline) {
  auto version = co_await connection_->execute(fcall_ro("version", 0), deadline);
  if (version && version->text == library_version()) co_return Result<void>();
  if (!version && version.error().kind != "NOFUNCTION") co_return version.error();
  redis::Command load("FUNCTION");
  load << "LOAD"
       << "REPLACE" << loadable_library();
  auto loaded = co_await connection_->execute(std::move(load), deadline);
  if (!loaded) co_return loaded.error();
  co_return Result<void>();
}

asio::awaitable<Result<std::vector<redis::Reply>>> Client::Impl::read_stream(std::shared_ptr<redis::Connection>& own,
                                                                             const std::string& key,
                                                                             const std::string& after, int limit,
                                                                             std::chrono::milliseconds block) {
  if (!own) {
    own = redis::Connection::create(connection_->executor(), connection_->options());
    own->start();
  }
  redis::Command command("XREAD");
  command << "COUNT" << limit;
  if (block.count() > 0) command << "BLOCK" << static_cast<std::int64_t>(block.count());
  command << "STREAMS" << key << after;
  const auto pinned = own;
  auto reply = co_await pinned->execute(std::move(command), Deadline::after(block + std::chrono::seconds(5)));
  if (!reply) co_return reply.error();
  if (!reply->is_array() || reply->elements.empty() || reply->elements[0].elements.size() != 2) {
    co_return std::vector<redis::Reply>();
  }
  co_return std::move(reply->elements[0].elements[1].elements);
}

asio::awaitable<Result<std::int64_t>> Client::Impl::redis_time(Deadline deadline) {
  auto time = co_await connection_->execute(redis::Command("TIME"), deadline);
  if (!time) co_return time.error();
  if (time->elements.size() != 2) co_return internal_error("[queue] TIME did not answer with seconds and microseconds");
  const std::int64_t us = to_int(time->elements[0].text) * 1'000'000 + to_int(time->elements[1].text);
  redis_ahead_us_ = us - monotonic_us();
  co_return us / 1000;
}

std::optional<std::int64_t> Client::Impl::reckoned_time() const {
  if (!redis_ahead_us_) return std::nullopt;
  return (monotonic_us() + *redis_ahead_us_) / 1000;
}

void Client::Impl::expect(const std::vector<IntakeEntry>& jobs_of_entry) {
  if (jobs_of_entry.size() < 2) return;
  auto& left = shared_entries_[std::string(stream_id(jobs_of_entry[0].entry_id))];
  left.clear();  // read again: whatever was said of it before, all are asked for once more
  for (const IntakeEntry& job : jobs_of_entry) left.insert(job.entry_id);
}

void Client::Impl::seen_to(std::span<const std::string_view> entry_ids, Deadline deadline) {
  redis::Command forget("XDEL");
  forget << keys_.in();
  const int bare = forget.size();
  for (const std::string_view id : entry_ids) {
    // With it the intake was numbered anew: what comes next stands before the place that has been read.
    if (is_last_entry(id)) intake_cursor_ = "0";
    if (stream_id(id).size() == id.size()) continue;
    const auto it = shared_entries_.find(std::string(stream_id(id)));
    if (it == shared_entries_.end()) continue;
    if (const auto left = it->second.find(id); left != it->second.end()) it->second.erase(left);
    if (!it->second.empty()) continue;
    forget << it->first;
    shared_entries_.erase(it);
  }
  if (forget.size() == bare) return;
  // If this does not happen, the entry is read again after the reconnect, and each of its jobs found admitted.
  asio::co_spawn(
      connection_->executor(),
      [](std::shared_ptr<redis::Connection> connection, redis::Command command,
         Deadline until) -> asio::awaitable<void> {
        (void)co_await connection->execute(std::move(command), until);
      }(connection_, std::move(forget), deadline),
      asio::detached);
}

bool Client::Impl::hold_leases() {
  const std::uint64_t now = connection_->generation();
  if (generation_ != 0 && now != generation_) {
    // Workers may have lost Redis with us: they get a lease's time to renew.
    hold_until_ = Deadline::Clock::now() + std::chrono::milliseconds(options_.lease_ms);
  }
  generation_ = now;
  return Deadline::Clock::now() < hold_until_;
}

// The index is walked in order of creation up to what is younger than the retention: what is older than that may
// have ended as long ago. Behind a page of jobs that are still needed the next sweep goes on, so that a long
// backlog costs a page a sweep.
asio::awaitable<void> Client::Impl::sweep(Deadline deadline) {
  constexpr std::int64_t kKeepEventsMs = 86'400'000;  // of a job that does not end
  if (Deadline::Clock::now() < next_sweep_) co_return;
  next_sweep_ = Deadline::Clock::now() + std::chrono::milliseconds(200);
  const auto now = co_await redis_time(deadline);
  if (!now) co_return;
  constexpr int kPage = 250, kPages = 40;
  for (int page = 0; page < kPages; ++page) {
    redis::Command range("ZRANGEBYSCORE");
    range << keys_.jobs() << sweep_cursor_ << *now - options_.retention_ms << "WITHSCORES"
          << "LIMIT" << 0 << kPage;
    auto found = co_await connection_->execute(std::move(range), deadline);
    if (!found) co_return;
    const auto& elements = found->elements;
    if (elements.empty()) {
      sweep_cursor_ = "-inf";
      co_return;
    }
    redis::Command sweep = fcall("sweep", 3 + elements.size() / 2);
    sweep << keys_.jobs() << keys_.open() << keys_.events();
    for (std::size_t i = 0; i < elements.size(); i += 2) sweep << keys_.job(elements[i].text);
    sweep << options_.retention_ms << kKeepEventsMs;
    for (std::size_t i = 0; i < elements.size(); i += 2) sweep << elements[i].text;
    const auto gone = co_await call(std::move(sweep), deadline);
    if (!gone) co_return;
    const bool last = elements.size() < 2 * kPage;
    const bool mostly_needed = gone->integer * 2 < static_cast<std::int64_t>(elements.size() / 2);
    sweep_cursor_ = last ? "-inf" : mostly_needed ? "(" + elements.back().text : sweep_cursor_;
    if (last || mostly_needed) co_return;
  }
}

}  // namespace ditfleet::queue
