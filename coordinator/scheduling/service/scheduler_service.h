// The scheduler's Redis shell: takes and keeps the leadership of a shard, feeds the state machine
// (scheduler.h) from intake, feed and worker registry, performs its actions, has lapsed leases reaped.
//
// Threads: everything from `executor`, which is single threaded or a strand; nothing blocks it.
// Survives Redis being away: keeps what it knows, asks again with back-off, compares with what is stored
// when it is back. Without the leadership it only waits for it.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <memory>
#include <optional>
#include <string>

#include "coordinator/scheduling/scheduler.h"
#include "shared/core/deadline.h"

namespace ditfleet::loras {
class RegistryMirror;
}
namespace ditfleet::queue {
class Client;
}
namespace ditfleet::redis {
class Connection;
}

namespace ditfleet::scheduling {

namespace asio = boost::asio;

struct SchedulerServiceOptions {
  std::string coordinator;  // unique among coordinators and their restarts
  std::int64_t leader_ttl_ms = 3000;
  int shard = 0;
  SchedulerOptions scheduler;  // `adapters` is filled in where it is unset and there is a directory
  std::shared_ptr<loras::RegistryMirror> adapters =
      {};  // who has which, and what is pinned; somebody lets it follow. Null: nobody has any
  std::chrono::milliseconds registry_period{250}, reap_period{100}, audit_period{30'000};
};

class SchedulerService {
 public:
  // `connection` is started and stopped by its owner; `client` works on it and is used for the scheduler's
  // intake by nobody else.
  SchedulerService(asio::any_io_executor executor, std::shared_ptr<redis::Connection> connection,
                   std::shared_ptr<queue::Client> client, SchedulerServiceOptions options);
  ~SchedulerService();  // ends without resigning; call stop() first
  SchedulerService(const SchedulerService&) = delete;
  SchedulerService& operator=(const SchedulerService&) = delete;

  void start();
  // Stores the virtual times and resigns if it leads, so that another takes over at once.
  asio::awaitable<void> stop(Deadline deadline);

  bool library_loaded() const;  // on the connection there is now
  bool leading() const;         // and done rebuilding
  bool leader_known() const;
  const std::string& refusal() const;  // why Redis did not say who leads when it was last asked; empty: it did
  // Units and queued jobs that wait, as of a second ago at most; also where another leads. Of plain XADDs beside jobs
  // that were submitted several in one call it counts the larger number only.
  std::size_t queued() const;
  // Nothing unless leading. Precondition: a complete spec.
  std::optional<Estimate> estimate(const job::JobSpec& spec, const std::string& tenant) const;
  // As Scheduler::waits_for(); empty unless leading.
  std::string waits_for(const queue::UnitRef& unit) const;
  std::int64_t now_us() const;  // Redis' clock

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace ditfleet::scheduling
