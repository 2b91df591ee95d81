// One leadership of a coordinator, with one epoch. Owns the Scheduler and the coroutines that serve it. Used only by
// SchedulerService.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <memory>
#include <set>
#include <string>

#include "coordinator/scheduling/scheduler.h"
#include "coordinator/scheduling/service/fleet_log.h"
#include "coordinator/scheduling/service/redis_clock.h"
#include "coordinator/scheduling/service/scheduler_metrics.h"
#include "coordinator/scheduling/service/scheduler_service.h"
#include "shared/core/log_throttle.h"
#include "shared/core/task_group.h"
#include "shared/queue/client.h"
#include "shared/queue/job_summary.h"
#include "shared/redis/connection.h"

namespace ditfleet::scheduling {

std::int64_t monotonic_us();

class LeaderTerm : public std::enable_shared_from_this<LeaderTerm> {
 public:
  struct Context {
    asio::any_io_executor executor;
    std::shared_ptr<redis::Connection> connection;
    std::shared_ptr<queue::Client> client;
    const SchedulerServiceOptions* options;
    SchedulerMetrics* metrics;
    RedisClock* clock;
    std::function<bool()> held;    // Redis' clock is doubtful
    std::function<void()> fenced;  // called when another coordinator leads
  };
  LeaderTerm(Context context, std::int64_t epoch);

  void start();
  void stop();  // cancels its coroutines
  asio::awaitable<void> store_virtual_times(Deadline deadline);
  asio::awaitable<void> store_history(Deadline deadline);

  std::int64_t epoch() const { return epoch_; }
  bool rebuilt() const { return rebuilt_; }
  bool hears() const { return feed_->hears(); }  // once rebuilt
  const Scheduler& scheduler() const { return *scheduler_; }

 private:
  asio::awaitable<void> run();
  asio::awaitable<bool> rebuild();
  asio::awaitable<void> follow_feed();
  asio::awaitable<void> read_intake();
  asio::awaitable<void> poll_registry();
  asio::awaitable<void> reap();
  asio::awaitable<void> every_second(asio::awaitable<void> (LeaderTerm::*store)(Deadline));
  void note_for_history(const queue::Event& event);
  asio::awaitable<void> audit();
  asio::awaitable<void> mend();
  asio::awaitable<void> admit(std::vector<queue::Admission> admissions);
  asio::awaitable<void> reject(std::vector<queue::Rejection> rejections);
  asio::awaitable<void> assign(Actions::Assignment assignment);
  asio::awaitable<void> revoke(std::vector<queue::Attempt> attempts, bool lost);

  // Starts a coroutine of this object, which keeps the object alive until it ends.
  void spawn(const char* name, asio::awaitable<void> task, Vital vital);
  // Passes sizes and pins of adapters to the scheduler if the registry mirror has a newer version.
  void update_adapters();
  void perform(Actions actions);
  void log_fleet();
  // Publishes the forecast every second, and when a unit starts or a worker becomes empty.
  asio::awaitable<void> publish_forecast();
  asio::awaitable<void> publish_outlook();
  void kick();
  void notice_reconnect();
  // Redis was away: workers get time to reconnect before leases lapse and silent workers lose units.
  void grant_grace();
  // kConflict ends the term. After any other error the call may have taken effect, so this requests an audit.
  void note_failure(const Error& error, const char* what);
  template <class T>
  bool failed(const Result<T>& done, const char* what) {
    if (!done) note_failure(done.error(), what);
    return !done;
  }
  asio::awaitable<void> pause(std::chrono::milliseconds time);
  std::int64_t now_us() { return context_.clock->now_us(monotonic_us()); }

  Context context_;
  std::int64_t epoch_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<queue::Feed> feed_;
  TaskGroup tasks_;
  asio::steady_timer wake_;
  bool kicked_ = false, rebuilt_ = false;
  bool rewind_ = false;  // read intake entries again that were not admitted
  bool audit_wanted_ = false, auditing_ = false;
  std::int64_t audited_us_ = 0;              // monotonic
  std::int64_t audit_spacing_us_ = 200'000;  // before the next one
  std::size_t admitting_ = 0;                // entries that were read and not yet admitted or rejected
  LogThrottle over_memory_;
  FleetLog fleet_log_;
  queue::FleetForecast forecast_;  // the latest one
  std::int64_t forecast_us_ = 0;   // monotonic
  Deadline outlook_due_ = Deadline::after(Deadline::Clock::duration::zero());
  std::uint64_t generation_ = 0;
  std::int64_t adapters_version_ = -1;  // that the scheduler has
  std::set<std::string> pinned_;
  std::map<std::string, std::int64_t> stored_times_;
  const bool keeps_history_;
  queue::JobSummaries summaries_;           // unused without a history
  std::vector<queue::HistoryJob> history_;  // ended, not yet stored
  std::int64_t unreadable_ = 0;             // open units, at the latest mend()
  bool missed_events_ = false;              // the next audit restores the summaries
};

}  // namespace ditfleet::scheduling
