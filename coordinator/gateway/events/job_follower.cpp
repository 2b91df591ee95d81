#include "coordinator/gateway/events/job_follower.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "coordinator/gateway/events/event_stream.h"

namespace ditfleet::gateway {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kEventsAtOnce = 1024;
// The feed reports every change. This bounds the delay if it should ever miss one.
constexpr seconds kCheckEvery{5};

Deadline sooner(Deadline a, Deadline b) { return a.time_point() < b.time_point() ? a : b; }

}  // namespace

JobFollower::JobFollower(JobService& service, const std::shared_ptr<EventHub>& hub, const std::string& job,
                         std::string after)
    : service_(service), job_(job), after_(std::move(after)), subscription_(hub->subscribe(job)) {}

asio::awaitable<bool> JobFollower::has_ended() {
  auto record = co_await service_.job(job_, "");
  if (!record) co_return record.error().code == Code::kNotFound;
  co_return job::is_terminal(record->state);
}

asio::awaitable<JobFollower::Batch> JobFollower::next(Deadline deadline) {
  bool last_look = false;  // the job has ended, so the next read returns all remaining events
  while (true) {
    if (subscription_->interrupted()) co_return Batch{Status::kGone, {}};
    if (ended_) co_return Batch{Status::kEnd, {}};
    Deadline look_again = Deadline::after(kCheckEvery);
    if (must_read_) {
      must_read_ = false;
      auto events = co_await service_.events(job_, after_, kEventsAtOnce);
      if (events && !events->empty()) {
        after_ = events->back().id;
        must_read_ = events->size() == kEventsAtOnce;
        ended_ = std::any_of(events->begin(), events->end(), ends_job);
        co_return Batch{Status::kEvents, std::move(*events)};
      }
      if ((events && last_look) || (!events && !is_retryable(events.error().code))) {
        ended_ = true;
        continue;
      }
      if (!events) {
        check_state_ = Deadline::after(Deadline::Clock::duration::zero());
        look_again = Deadline::after(milliseconds(500));
      } else if (subscription_->take_may_have_ended() || check_state_.passed()) {
        check_state_ = Deadline::after(kCheckEvery);
        last_look = must_read_ = co_await has_ended();
        if (must_read_) continue;
      }
    }
    const auto wake = co_await subscription_->wait(sooner(deadline, look_again));
    if (wake == EventHub::Wake::kStopped) co_return Batch{Status::kStopped, {}};
    must_read_ = true;
    if (wake == EventHub::Wake::kTimeout && deadline.passed() && !subscription_->interrupted())
      co_return Batch{Status::kIdle, {}};
  }
}

asio::awaitable<Result<queue::JobRecord>> wait_for_end(JobService& service, EventHub::Subscription& subscription,
                                                       std::string job, Deadline deadline) {
  while (true) {
    auto record = co_await service.job(job, "");
    if (record && job::is_terminal(record->state)) co_return std::move(*record);
    if (!record && !is_retryable(record.error().code)) co_return record.error();
    const Deadline look_again = Deadline::after(record ? milliseconds(kCheckEvery) : milliseconds(500));
    while (true) {
      const auto wake = co_await subscription.wait(sooner(deadline, look_again));
      if (wake == EventHub::Wake::kStopped) {
        co_return unavailable("this gateway is stopping; job " + job + " continues, see /v1/jobs/" + job);
      }
      if (subscription.interrupted()) co_return Error{Code::kCanceled, "the client closed its connection", {}};
      if (deadline.passed()) {
        co_return Error{
            Code::kDeadlineExceeded,
            "the image was not ready within gateway.request_timeout_ms; job " + job + " continues, see /v1/jobs/" + job,
            {}};
      }
      if (wake == EventHub::Wake::kTimeout || subscription.take_may_have_ended()) break;
    }
  }
}

}  // namespace ditfleet::gateway
