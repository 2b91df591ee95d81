// The process's only reader of the shard's feed. It wakes the subscribers of a job when the job changes.
//
// The hub does not deliver events: a subscriber that wakes up reads its job's event stream from its last position. A
// gap in the feed, a Redis restart or a slow client therefore neither loses nor duplicates an event.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/gateway/events/fleet_history.h"
#include "shared/core/deadline.h"
#include "shared/core/result.h"
#include "shared/queue/client.h"

namespace ditfleet::gateway {

namespace asio = boost::asio;

// Not thread-safe: call every function on one executor.
class EventHub : public std::enable_shared_from_this<EventHub> {
 public:
  using Next = std::function<asio::awaitable<Result<queue::Feed::Batch>>(std::chrono::milliseconds block)>;

  using OpenUnits = std::function<asio::awaitable<Result<std::vector<queue::UnitView>>>()>;

  enum class Wake { kEvents, kTimeout, kStopped };

  // A subscriber of one job's events. Events between the subscription and wait() also end the wait.
  class Subscription {
   public:
    Subscription(std::shared_ptr<EventHub> hub, const std::string& job);
    ~Subscription() { hub_->waiters_.erase(place_); }
    Subscription(const Subscription&) = delete;
    Subscription& operator=(const Subscription&) = delete;

    // Waits until the job may have changed (an event or a gap), the deadline, interrupt() or the hub's stop().
    asio::awaitable<Wake> wait(Deadline deadline);
    // Whether an event that ends the job, or a gap, arrived since the last call.
    bool take_may_have_ended() { return std::exchange(may_have_ended_, false); }
    // Ends the wait as if its deadline had passed. Call it if the client is gone.
    void interrupt();
    bool interrupted() const { return interrupted_; }

   private:
    friend class EventHub;
    std::shared_ptr<EventHub> hub_;
    std::multimap<std::string, Subscription*>::iterator place_;
    bool woken_ = false, may_have_ended_ = false, interrupted_ = false;
    std::function<void()> wake_;  // of the wait in progress
  };

  // `open_units` is called after a gap to correct the history. Unset: the history is not corrected.
  EventHub(asio::any_io_executor executor, Next next, OpenUnits open_units = {});

  std::unique_ptr<Subscription> subscribe(const std::string& job);  // "": of all jobs
  // Reads the feed until stop(). Retries twice a second while Redis is unavailable. Static, so that the coroutine
  // holds a reference even if it starts after all other owners are gone.
  static asio::awaitable<void> run(std::shared_ptr<EventHub> self);
  // Ends every present and future wait with kStopped.
  void stop();
  bool stopped() const { return stopped_; }
  std::size_t subscriptions() const { return waiters_.size(); }
  FleetHistory& history() { return history_; }

 private:
  void wake_for(const queue::Feed::Batch& batch);
  void wake(Subscription& subscription, bool may_have_ended);
  void wake_all(bool may_have_ended);

  asio::any_io_executor executor_;
  Next next_;
  OpenUnits open_units_;
  FleetHistory history_;
  std::multimap<std::string, Subscription*> waiters_;
  bool stopped_ = false;
};

}  // namespace ditfleet::gateway
