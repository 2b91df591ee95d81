// Reads one job's events in order from a given id on, and waits for those to come. Survives a Redis that
// goes away and comes back: nothing is missed, nothing comes twice.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/gateway/events/event_hub.h"
#include "coordinator/gateway/job_service.h"
#include "shared/core/deadline.h"

namespace ditfleet::gateway {

class JobFollower {
 public:
  enum class Status {
    kEvents,  // `events` has at least one
    kIdle,    // the deadline passed
    kEnd,  // the job has ended and all its events were given; or they have expired, or can't be read however often it
           // is tried
    kStopped,  // the gateway ends
    kGone,     // interrupt()
  };
  struct Batch {
    Status status = Status::kIdle;
    std::vector<queue::Event> events;
  };

  // `service` outlives this. `after`: the id of the last event already known, "0" for none.
  JobFollower(JobService& service, std::shared_ptr<EventHub> hub, std::string job, std::string after);

  asio::awaitable<Batch> next(Deadline deadline);
  // The client is gone: a wait in progress, and every later one, ends.
  void interrupt();

 private:
  asio::awaitable<bool> has_ended();

  JobService& service_;
  std::string job_, after_;
  std::unique_ptr<EventHub::Subscription> subscription_;
  bool must_read_ = true, ended_ = false, gone_ = false;
  Deadline check_state_ = Deadline::after(Deadline::Clock::duration::zero());
};

// The job's record once it has ended. kDeadlineExceeded when it has not by then, kUnavailable when the
// gateway stops, kCanceled when the client is gone, kNotFound when it expired. A Redis that is away meanwhile is waited
// for; an error that would come again is the answer.
asio::awaitable<Result<queue::JobRecord>> wait_for_end(JobService& service, EventHub::Subscription& subscription,
                                                       std::string job, Deadline deadline);

}  // namespace ditfleet::gateway
