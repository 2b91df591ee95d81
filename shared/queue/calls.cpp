#include "shared/queue/calls.h"

#include <algorithm>
#include <utility>

#include "shared/queue/library.h"
#include "shared/queue/records.h"

namespace ditfleet::queue {
namespace {

constexpr std::chrono::milliseconds kSilence{500};

std::int64_t monotonic_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(Deadline::Clock::now().time_since_epoch()).count();
}

// A process of another build has replaced the library, or only this process's library knows the format of the records.
// The refused call has changed nothing.
bool is_of_another_library(const Error& error) {
  return error.kind == "NOFUNCTION" || error.kind == "BADARG" || error.kind == "FORMAT";
}

// 0: the version has no build number.
std::int64_t build_of(std::string_view version) {
  const auto space = version.find(' ');
  return space == std::string_view::npos ? 0 : to_int(version.substr(0, space));
}

redis::Command function_call(const char* how, std::string_view name, std::size_t keys) {
  redis::Command command(how);
  command << std::string(kLibraryName) + "_" + std::string(name) << static_cast<std::int64_t>(keys);
  return command;
}

}  // namespace

redis::Command fcall(std::string_view name, std::size_t keys) { return function_call("FCALL", name, keys); }

redis::Command fcall_ro(std::string_view name, std::size_t keys) { return function_call("FCALL_RO", name, keys); }

Client::Impl::Impl(std::shared_ptr<redis::Connection> connection, QueueOptions options)
    : connection_(std::move(connection)), options_(options), keys_(options.shard) {}

Client::Impl::~Impl() {
  if (intake_connection_) intake_connection_->stop();
  if (mailbox_connection_) mailbox_connection_->stop();
}

asio::awaitable<Result<redis::Reply>> Client::Impl::call(redis::Command command, Deadline deadline) {
  return call_on(connection_, std::move(command), deadline);
}

asio::awaitable<Result<redis::Reply>> Client::Impl::call_on(std::shared_ptr<redis::Connection> connection,
                                                            redis::Command command, Deadline deadline) {
  auto reply = co_await connection->execute(command, deadline);
  if (!reply && reply.error().kind == "UNREADABLE") co_return unavailable("[queue] " + reply.error().message);
  if (reply || !is_of_another_library(reply.error())) co_return reply;
  if (auto loaded = co_await load(deadline); !loaded) co_return loaded.error();
  reply = co_await connection->execute(std::move(command), deadline);
  if (!reply && reply.error().kind == "FORMAT") {
    co_return unavailable("[queue] Redis at " + connection_->options().endpoint.display() +
                          " was used by another version: " + reply.error().message +
                          "; start the newer version, which can read both");
  }
  if (!reply && is_of_another_library(reply.error())) {
    co_return unavailable("[queue] another version of the library " + std::string(kLibraryName) +
                          " is installed in Redis at " + connection_->options().endpoint.display() +
                          "; try again, or upgrade this process, which has build " + std::to_string(library_build()) +
                          " (" + reply.error().message + ")");
  }
  co_return reply;
}

asio::awaitable<Result<void>> Client::Impl::load(Deadline deadline) {
  auto version = co_await connection_->execute(fcall_ro("version", 0), deadline);
  if (version && (version->text == library_version() || build_of(version->text) > library_build()))
    co_return Result<void>();
  if (!version && version.error().kind != "NOFUNCTION") co_return version.error();
  redis::Command load("FUNCTION");
  load << "LOAD"
       << "REPLACE" << loadable_library();
  const auto loaded = co_await connection_->execute(std::move(load), deadline);
  if (!loaded && loaded.error().kind == "NOPERM") {
    co_return unavailable("[queue] Redis at " + connection_->options().endpoint.display() +
                          " has no Functions of this version yet, and this process may not load them; start a "
                          "coordinator of this version, which does (" +
                          loaded.error().message + ")");
  }
  co_return without_value(loaded);
}

asio::awaitable<Result<redis::Reply>> Client::Impl::call_with_replicas(redis::Command command, Deadline deadline) {
  constexpr std::int64_t kWaitMs = 1000;
  // WAIT holds up its connection and knows only what this connection wrote.
  const auto own = redis::Connection::create(connection_->executor(), connection_->options());
  own->start();
  auto reply = co_await call_on(own, std::move(command), deadline);
  if (!reply) co_return reply;
  const auto replicas = co_await own->execute(redis::Command("WAIT") << options_.wait_replicas << kWaitMs, deadline);
  const std::int64_t confirmed = replicas && own->generation() == 1 ? replicas->integer : 0;
  if (confirmed >= options_.wait_replicas) co_return reply;
  co_return unavailable(
      "[queue] the job is submitted, but " + std::to_string(confirmed) + " of " +
      std::to_string(options_.wait_replicas) + " replicas (queue.wait_replicas) confirmed it within a second" +
      (replicas ? "" : " (" + replicas.error().message + ")") +
      "; repeat the request with the same Idempotency-Key, without which it would become another job");
}

asio::awaitable<Result<redis::Reply>> Client::Impl::read_job(const std::string& id, Deadline deadline) {
  co_return co_await call(fcall_ro("job", 7) << keys_.job(id) << keys_.in() << keys_.units() << keys_.open()
                                             << keys_.specs() << keys_.last() << keys_.events() << id,
                          deadline);
}

asio::awaitable<Result<std::vector<redis::Reply>>> Client::Impl::read_stream(std::shared_ptr<redis::Connection>& own,
                                                                             const std::string& key,
                                                                             const std::string& after, int limit,
                                                                             std::chrono::milliseconds block,
                                                                             std::chrono::milliseconds silence) {
  if (!own) {
    own = redis::Connection::create(connection_->executor(), connection_->options());
    own->start();
  }
  redis::Command command("XREAD");
  command << "COUNT" << limit;
  if (block.count() > 0) command << "BLOCK" << static_cast<std::int64_t>(block.count());
  command << "STREAMS" << key << after;
  const auto pinned = own;
  auto reply = co_await pinned->execute(std::move(command), Deadline::after(block + silence));
  // Redis replies when `block` has passed, at the latest.
  if (!reply && reply.error().code == Code::kDeadlineExceeded) pinned->drop("no reply to a blocking read");
  if (!reply) co_return reply.error();
  if (!reply->is_array() || reply->elements.empty() || reply->elements[0].elements.size() != 2) {
    co_return std::vector<redis::Reply>();
  }
  co_return std::move(reply->elements[0].elements[1].elements);
}

asio::awaitable<Result<std::int64_t>> Client::Impl::redis_time(Deadline deadline) {
  auto time = co_await connection_->execute(redis::Command("TIME"), deadline);
  if (!time) co_return time.error();
  const auto us = parse_time_us(*time);
  if (!us) co_return us.error();
  redis_ahead_us_ = *us - monotonic_us();
  co_return *us / 1000;
}

std::optional<std::int64_t> Client::Impl::estimated_time() const {
  if (!redis_ahead_us_) return std::nullopt;
  return (monotonic_us() + *redis_ahead_us_) / 1000;
}

std::chrono::milliseconds Client::Impl::hold_time() const {
  // A worker's last attempt to connect may have begun just before Redis was back, and its next one backs off.
  const redis::ConnectionOptions& worker = connection_->options();
  return std::chrono::milliseconds(options_.lease_ms) + worker.connect_timeout + worker.backoff_max;
}

bool Client::Impl::must_hold(Deadline::Clock::time_point asked, bool answered) {
  const std::uint64_t now = connection_->generation();
  const bool reconnected = generation_ != 0 && now != generation_;
  generation_ = now;
  // Workers cannot renew while Redis is silent, even if no connection is lost.
  const auto silence = std::max<Deadline::Clock::duration>(kSilence, std::chrono::milliseconds(options_.lease_ms) / 2);
  if (reconnected || !answered || Deadline::Clock::now() - asked > silence) hold_leases();
  return Deadline::Clock::now() < hold_until_;
}

// Reads the index in order of creation, up to jobs younger than the retention. It stops after a page of jobs of which
// most are kept and continues there next time, so that a long backlog costs one page per sweep.
asio::awaitable<void> Client::Impl::sweep(std::int64_t epoch, Deadline deadline) {
  if (Deadline::Clock::now() < next_sweep_) co_return;
  next_sweep_ = Deadline::Clock::now() + std::chrono::seconds(1);
  const auto now = co_await redis_time(deadline);
  if (!now) co_return;
  constexpr int kPage = 250, kPages = 40;
  for (int page = 0; page < kPages; ++page) {
    redis::Command range("ZRANGEBYSCORE");
    const std::int64_t max_age_ms = options_.max_age_ms > 0 ? options_.max_age_ms : *now;
    range << keys_.jobs() << sweep_cursor_ << *now - std::min(options_.retention_ms, max_age_ms) << "WITHSCORES"
          << "LIMIT" << 0 << kPage;
    auto found = co_await connection_->execute(std::move(range), deadline);
    if (!found) co_return;
    const auto& elements = found->elements;
    if (elements.empty()) {
      sweep_cursor_ = "-inf";
      co_return;
    }
    redis::Command sweep = fcall("sweep_led", 4 + elements.size() / 2);
    sweep << keys_.leader() << keys_.jobs() << keys_.open() << keys_.events();
    for (std::size_t i = 0; i < elements.size(); i += 2) sweep << keys_.job(elements[i].text);
    sweep << epoch << options_.retention_ms << kKeepEventsMs;
    for (std::size_t i = 0; i < elements.size(); i += 2) sweep << elements[i].text;
    const auto gone = co_await call(std::move(sweep), deadline);
    if (!gone) co_return;
    for (std::size_t i = 0; i < elements.size(); i += 2)
      if (to_int(elements[i + 1].text) <= *now - max_age_ms) too_old_.push_back(elements[i].text);
    const bool last = elements.size() < 2 * kPage;
    const bool mostly_needed = gone->integer * 2 < static_cast<std::int64_t>(elements.size() / 2);
    sweep_cursor_ = last ? "-inf" : mostly_needed ? "(" + elements.back().text : sweep_cursor_;
    if (last || mostly_needed) co_return;
  }
}

}  // namespace ditfleet::queue
