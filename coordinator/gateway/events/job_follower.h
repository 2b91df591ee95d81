// Reads one job's events in order from a given id, and waits for new events. Returns each event exactly once, even if
// Redis is temporarily unavailable.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/gateway/backend/job_service.h"
#include "coordinator/gateway/events/event_hub.h"
#include "shared/core/deadline.h"

namespace ditfleet::gateway {

class JobFollower {
 public:
  enum class Status {
    kEvents,   // `events` has at least one
    kIdle,     // the deadline passed
    kEnd,      // all events of an ended job were returned, or the events have expired or cannot be read
    kStopped,  // the gateway is stopping
    kGone,     // interrupt() was called
  };
  struct Batch {
    Status status = Status::kIdle;
    std::vector<queue::Event> events;
  };

  // `service` must outlive this object. `after`: the id of the last event that the client has, or "0".
  JobFollower(JobService& service, const std::shared_ptr<EventHub>& hub, const std::string& job, std::string after);

  asio::awaitable<Batch> next(Deadline deadline);
  // Ends the current wait and every later wait. Call it if the client is gone.
  void interrupt() { subscription_->interrupt(); }

 private:
  asio::awaitable<bool> has_ended();

  JobService& service_;
  std::string job_, after_;
  std::unique_ptr<EventHub::Subscription> subscription_;
  bool must_read_ = true, ended_ = false;
  Deadline check_state_ = Deadline::after(Deadline::Clock::duration::zero());
};

// Waits for the job to end and returns its record. Retries while Redis is unavailable.
// Errors: kDeadlineExceeded, kUnavailable (the gateway is stopping), kCanceled (the client is gone), kNotFound (the job
// expired), and any other error of JobService::job that is not retryable.
asio::awaitable<Result<queue::JobRecord>> wait_for_end(JobService& service, EventHub::Subscription& subscription,
                                                       std::string job, Deadline deadline);

}  // namespace ditfleet::gateway
