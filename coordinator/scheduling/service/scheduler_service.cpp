#include "coordinator/scheduling/service/scheduler_service.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <ctime>

#include "coordinator/scheduling/service/clock_watch.h"
#include "coordinator/scheduling/service/leader_term.h"
#include "coordinator/scheduling/service/leadership.h"
#include "coordinator/scheduling/service/redis_check.h"
#include "shared/core/task_group.h"
#include "shared/queue/client.h"
#include "shared/queue/keys.h"

namespace ditfleet::scheduling {
namespace {

using namespace std::chrono_literals;

constexpr auto kCall = 1s;
constexpr auto kPause = 50ms;
constexpr std::int64_t kSampleUs = 1'000'000;
constexpr std::int64_t kCheckUs = 10'000'000, kRefusedCheckUs = 1'000'000;
constexpr std::int64_t kLeastJumpMs = 5000;

// Runs evenly, also while the host is suspended.
std::int64_t even_us() {
  timespec time{};
  ::clock_gettime(CLOCK_BOOTTIME, &time);
  return time.tv_sec * 1'000'000 + time.tv_nsec / 1000;
}

}  // namespace

class SchedulerService::Impl : public std::enable_shared_from_this<SchedulerService::Impl> {
 public:
  Impl(asio::any_io_executor executor, std::shared_ptr<redis::Connection> connection,
       std::shared_ptr<queue::Client> client, SchedulerServiceOptions options)
      : executor_(std::move(executor)),
        connection_(std::move(connection)),
        client_(std::move(client)),
        options_(std::move(options)),
        metrics_(options_.objectives_ms),
        // The leader's key has expired before a jump counts, so that no transition comes before the verdict.
        watch_(1000 * std::max({kLeastJumpMs, options_.leader_ttl_ms, client_->options().lease_ms})),
        leadership_(options_.leader_ttl_ms * 1000),
        tasks_(executor_) {
    queue::FleetForecast none;  // for a gauge of 0 before the first leadership
    for (const auto& [name, unused] : options_.scheduler.catalogue.models) none.models[name];
    metrics_.backlog(none);
  }

  void start() {
    tasks_.spawn(
        "leadership",
        [](std::shared_ptr<Impl> self) -> asio::awaitable<void> { co_await self->keep_lead(); }(shared_from_this()),
        Vital::kForever);
    tasks_.spawn(
        "leadership.end",
        [](std::shared_ptr<Impl> self) -> asio::awaitable<void> { co_await self->watch_lead(); }(shared_from_this()),
        Vital::kForever);
  }

  void drop() {
    end_term();
    tasks_.stop();
  }

  asio::awaitable<void> stop(Deadline deadline) {
    const auto term = std::exchange(term_, nullptr);
    const auto epoch = leadership_.epoch();
    tasks_.stop();
    if (term) {
      term->stop();
      metrics_.leading(false, 0);
      if (connection_->connected()) {
        if (term->rebuilt()) {
          co_await term->store_virtual_times(deadline);
          co_await term->store_history(deadline);
        }
        const auto resigned = co_await client_->resign(options_.coordinator, epoch, deadline);
        if (resigned) spdlog::info("scheduler: resigned the leadership");
      }
    }
    co_await tasks_.join();
  }

  bool loaded() const { return loaded_ && connection_->connected() && loaded_generation_ == connection_->generation(); }
  bool leading() const { return term_ != nullptr && term_->rebuilt(); }
  bool leader_known() const {
    return leading() || (!leadership_.leading() && leadership_.leader_known(monotonic_us()));
  }
  bool hears() const { return !leading() || term_->hears(); }
  const std::string& refusal() const { return redis_refused() ? check_.refusal : refusal_; }
  bool redis_refused() const { return !check_.refusal.empty(); }
  std::vector<std::string> warnings() const {
    auto out = check_.warnings;
    if (leading() && watch_.held()) out.push_back(held_);
    return out;
  }
  std::optional<Estimate> estimate(const job::JobSpec& spec, const std::string& tenant) {
    if (!leading()) return std::nullopt;
    return term_->scheduler().estimate(spec, tenant, now_us());
  }
  std::string waits_for(const queue::UnitRef& unit) {
    return leading() ? term_->scheduler().waits_for(unit, now_us()) : std::string();
  }
  std::int64_t now_us() { return clock_.now_us(monotonic_us()); }

 private:
  // A leadership ends with its lease, also while calls wait for a Redis that does not answer.
  asio::awaitable<void> watch_lead() {
    for (;;) {
      co_await pause(kPause);
      apply(leadership_.on_tick(monotonic_us()));
    }
  }

  asio::awaitable<void> keep_lead() {
    std::int64_t sampled_us = -kSampleUs;
    for (;;) {
      // One statement each, because GCC 12 awaits what stands behind && if both stand beside a ||.
      bool usable = loaded();
      if (!usable) usable = co_await load();
      if (usable) usable = co_await inspect_redis();
      if (!usable || redis_refused()) {
        co_await pause(kPause);
        continue;
      }
      const auto now = monotonic_us();
      if (now >= leadership_.next_call_us()) {
        const auto epoch =
            co_await client_->lead(options_.coordinator, options_.leader_ttl_ms,
                                   Deadline::after(std::chrono::milliseconds(options_.leader_ttl_ms / 2)));
        const auto answered = monotonic_us();
        apply(epoch ? leadership_.on_answer(*epoch, now, answered) : leadership_.on_tick(answered));
        if (epoch) {
          refusal_.clear();
        } else {
          if (refusal_.empty())
            spdlog::warn("scheduler: cannot request the leadership: {}; retrying", epoch.error().message);
          refusal_ = epoch.error().message;
          co_await pause(kPause);
        }
      }
      if (monotonic_us() - sampled_us > kSampleUs) {
        sampled_us = monotonic_us();
        co_await sample();
      }
      const auto left =
          std::chrono::microseconds(std::max<std::int64_t>(1'000, leadership_.next_call_us() - monotonic_us()));
      co_await pause(std::min<std::chrono::microseconds>(left, 100ms));
    }
  }

  // At each connect, and from time to time. False: Redis did not answer.
  asio::awaitable<bool> inspect_redis() {
    if (connection_->generation() == checked_generation_ && monotonic_us() < next_check_us_) co_return true;
    const auto info = co_await connection_->execute(redis::Command("INFO") << "persistence"
                                                                           << "memory",
                                                    Deadline::after(kCall));
    if (!info && info.error().source != Source::kRedis) co_return false;
    const auto before = std::exchange(check_, {});
    if (info)  // an ACL may forbid it
      check_ = check_redis(info->text, connection_->options().endpoint.display(), options_.allow_eviction);
    if (check_ != before) {
      if (redis_refused()) spdlog::error("scheduler: {}", check_.refusal);
      for (const auto& warning : check_.warnings) spdlog::warn("scheduler: {}", warning);
    }
    checked_generation_ = connection_->generation();
    next_check_us_ = monotonic_us() + (redis_refused() ? kRefusedCheckUs : kCheckUs);
    co_return true;
  }

  asio::awaitable<bool> load() {
    const auto done = co_await client_->load_library(Deadline::after(kCall));
    loaded_ = done.ok();
    if (done) {
      loaded_generation_ = connection_->generation();
      warned_ = false;
      co_return true;
    }
    if (!warned_)
      spdlog::warn("scheduler: cannot use Redis at {} yet: {}", connection_->options().endpoint.display(),
                   done.error().message);
    warned_ = true;
    co_return false;
  }

  asio::awaitable<void> sample() {
    const auto sent = monotonic_us(), even = even_us();
    const auto depth = co_await client_->depth(Deadline::after(kCall));
    if (!depth || even_us() - even > kSampleUs) co_return;  // a process that was stopped meanwhile learns nothing
    watch_.observe(depth->time_us, even, even_us());
    if (leadership_.leading() && !co_await judge_clock(depth->time_us / 1000)) co_return;
    clock_.sync(depth->time_us, sent, monotonic_us());
    clock_known_ = true;
    if (term_) metrics_.jobs(depth->queued_jobs, depth->queued_jobs + depth->admitted_jobs);
  }

  // False: Redis did not answer.
  asio::awaitable<bool> judge_clock(std::int64_t now_ms) {
    auto mark = co_await client_->clock_mark(Deadline::after(kCall));
    if (!mark) co_return false;
    const bool marked = !mark->held.empty();
    const auto verdict = watch_.judge(mark->seen_ms * 1000, marked);
    if (verdict == ClockWatch::Verdict::kHold) {
      if (!marked) {
        mark->held = fmt::format(
            "the clock of Redis jumped by {} s; leases, deadlines and the removal of old jobs are on hold until it is "
            "back, an hour has passed or you accept the new time: redis-cli DEL '{}'",
            watch_.jump_us() / 1'000'000, queue::Keys(client_->options().shard).clock());
        if (!co_await client_->set_clock_mark(*mark, Deadline::after(kCall))) co_return false;
        watch_.on_marked();
      }
      held_ = mark->held;
      spdlog::error("scheduler: {}", held_);
    } else if (verdict == ClockWatch::Verdict::kRelease) {
      spdlog::warn("scheduler: follows the clock of Redis again");
    }
    metrics_.clock_held(watch_.held());
    if (watch_.held() || verdict == ClockWatch::Verdict::kRelease)
      (void)co_await client_->bring_forward(now_ms, Deadline::after(kCall));
    const queue::ClockMark seen{.seen_ms = now_ms, .held = {}};
    if (!watch_.held()) (void)co_await client_->set_clock_mark(seen, Deadline::after(kCall));
    co_return true;
  }

  void apply(Leadership::Change change) {
    if (change == Leadership::Change::kLost) {
      spdlog::warn("scheduler: lost the leadership");
      end_term();
    } else if (change == Leadership::Change::kGained) {
      tasks_.spawn(
          "leadership.begin",
          [](std::shared_ptr<Impl> self, std::int64_t epoch) -> asio::awaitable<void> {
            co_await self->begin_term(epoch);
          }(shared_from_this(), leadership_.epoch()),
          Vital::kOnce);
    }
  }

  asio::awaitable<void> begin_term(std::int64_t epoch) {
    clock_known_ = false;
    while (!clock_known_) {  // decisions need Redis' clock
      co_await sample();
      if (!clock_known_) co_await pause(kPause);
    }
    if (leadership_.epoch() != epoch || term_) co_return;
    term_ = std::make_shared<LeaderTerm>(
        LeaderTerm::Context{.executor = executor_,
                            .connection = connection_,
                            .client = client_,
                            .options = &options_,
                            .metrics = &metrics_,
                            .clock = &clock_,
                            .held = [this] { return watch_.held(); },
                            .fenced =
                                [weak = weak_from_this()] {
                                  if (const auto self = weak.lock())
                                    self->apply(self->leadership_.on_fenced(monotonic_us()));
                                }},
        epoch);
    metrics_.leading(true, epoch);
    term_->start();
  }

  void end_term() {
    if (!term_) return;
    std::exchange(term_, nullptr)->stop();
    metrics_.leading(false, 0);
  }

  asio::awaitable<void> pause(std::chrono::microseconds time) {
    asio::steady_timer timer(executor_, time);
    co_await timer.async_wait(asio::use_awaitable);
  }

  asio::any_io_executor executor_;
  std::shared_ptr<redis::Connection> connection_;
  std::shared_ptr<queue::Client> client_;
  SchedulerServiceOptions options_;
  SchedulerMetrics metrics_;
  RedisClock clock_;
  RedisCheck check_;
  ClockWatch watch_;
  std::string held_;  // why `watch_` holds
  Leadership leadership_;
  std::shared_ptr<LeaderTerm> term_;
  TaskGroup tasks_;
  bool loaded_ = false, warned_ = false, clock_known_ = false;
  std::uint64_t loaded_generation_ = 0, checked_generation_ = 0;
  std::int64_t next_check_us_ = 0;
  std::string refusal_;  // the error of the latest request for the leadership
};

SchedulerService::SchedulerService(asio::any_io_executor executor, std::shared_ptr<redis::Connection> connection,
                                   std::shared_ptr<queue::Client> client, SchedulerServiceOptions options)
    : impl_(std::make_shared<Impl>(std::move(executor), std::move(connection), std::move(client), std::move(options))) {
}
SchedulerService::~SchedulerService() { impl_->drop(); }
void SchedulerService::start() { impl_->start(); }
asio::awaitable<void> SchedulerService::stop(Deadline deadline) { return impl_->stop(deadline); }
bool SchedulerService::library_loaded() const { return impl_->loaded(); }
bool SchedulerService::leading() const { return impl_->leading(); }
bool SchedulerService::leader_known() const { return impl_->leader_known(); }
bool SchedulerService::hears() const { return impl_->hears(); }
const std::string& SchedulerService::refusal() const { return impl_->refusal(); }
bool SchedulerService::redis_refused() const { return impl_->redis_refused(); }
std::vector<std::string> SchedulerService::warnings() const { return impl_->warnings(); }
std::optional<Estimate> SchedulerService::estimate(const job::JobSpec& spec, const std::string& tenant) const {
  return impl_->estimate(spec, tenant);
}
std::string SchedulerService::waits_for(const queue::UnitRef& unit) const { return impl_->waits_for(unit); }
std::int64_t SchedulerService::now_us() const { return impl_->now_us(); }

}  // namespace ditfleet::scheduling
