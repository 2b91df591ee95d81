#include "coordinator/gateway/events/event_hub.h"

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <utility>

#include "coordinator/gateway/events/event_stream.h"
#include "shared/core/wall_clock.h"

namespace ditfleet::gateway {

EventHub::Subscription::Subscription(std::shared_ptr<EventHub> hub, const std::string& job)
    : hub_(std::move(hub)), place_(hub_->waiters_.emplace(job, this)) {}

asio::awaitable<EventHub::Wake> EventHub::Subscription::wait(Deadline deadline) {
  if (!hub_->stopped_ && !woken_ && !interrupted_ && !deadline.passed()) {
    asio::steady_timer timer(hub_->executor_, deadline.time_point());
    wake_ = [&timer] { timer.cancel(); };
    boost::system::error_code ignored;
    co_await timer.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    wake_ = nullptr;
  }
  if (hub_->stopped_) co_return Wake::kStopped;
  co_return std::exchange(woken_, false) ? Wake::kEvents : Wake::kTimeout;
}

void EventHub::Subscription::interrupt() {
  interrupted_ = true;
  if (wake_) wake_();
}

EventHub::EventHub(asio::any_io_executor executor, Next next, OpenUnits open_units)
    : executor_(std::move(executor)), next_(std::move(next)), open_units_(std::move(open_units)) {}

std::unique_ptr<EventHub::Subscription> EventHub::subscribe(const std::string& job) {
  return std::make_unique<Subscription>(shared_from_this(), job);
}

asio::awaitable<void> EventHub::run(std::shared_ptr<EventHub> self) {
  bool away = true;  // also before the first batch: earlier events were not read
  bool stale = false;
  while (!self->stopped_) {
    auto batch = co_await self->next_(std::chrono::milliseconds(1000));
    if (self->stopped_) break;
    if (!batch) {
      away = true;
      asio::steady_timer pause(self->executor_, std::chrono::milliseconds(500));
      co_await pause.async_wait(asio::use_awaitable);
      continue;
    }
    if (std::exchange(away, false)) batch->gap = true;
    self->wake_for(*batch);
    for (const auto& event : batch->events) self->history_.apply(event);
    stale |= batch->gap;
    if (!stale || !self->open_units_) continue;
    // Events since then wait in the feed. The later ones bring what was read up to date.
    auto units = co_await self->open_units_();
    if (!units) continue;
    self->history_.restore(*units, unix_ms());
    stale = false;
  }
}

void EventHub::wake_for(const queue::Feed::Batch& batch) {
  if (batch.gap) wake_all(true);
  for (const auto& event : batch.events) {
    const auto [begin, end] = waiters_.equal_range(event.job);
    for (auto it = begin; it != end; ++it) wake(*it->second, ends_job(event));
  }
  const auto [begin, end] = waiters_.equal_range("");  // they wait for all jobs
  for (auto it = begin; it != end && !batch.events.empty(); ++it) wake(*it->second, false);
}

void EventHub::wake(Subscription& subscription, bool may_have_ended) {
  subscription.woken_ = true;
  subscription.may_have_ended_ |= may_have_ended;
  if (subscription.wake_) subscription.wake_();
}

void EventHub::wake_all(bool may_have_ended) {
  for (auto& [job, subscription] : waiters_) wake(*subscription, may_have_ended);
}

void EventHub::stop() {
  stopped_ = true;
  wake_all(false);
}

}  // namespace ditfleet::gateway
