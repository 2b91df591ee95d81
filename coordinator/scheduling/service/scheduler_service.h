// Runs the scheduler (scheduler.h) on Redis: keeps the leadership of a shard, passes intake, feed and worker registry
// to the state machine, performs its actions and reaps expired leases. While another coordinator leads, it waits.
//
// Call every function on `executor`, which must be single-threaded or a strand. No function blocks it.
// While Redis is down, it keeps its state and retries with backoff. After the reconnect it audits the state.
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
  bool allow_eviction = false;                           // use a Redis that deletes jobs when its memory is full
  SchedulerOptions scheduler;                            // an unset `adapters` uses the mirror below
  std::map<std::string, std::int64_t> objectives_ms;     // in which the jobs of a model should end, by model; a metric
  std::shared_ptr<loras::RegistryMirror> adapters = {};  // kept current by its owner; null: no tenant has adapters
};

class SchedulerService {
 public:
  // The caller starts and stops `connection`, which `client` uses. No other scheduler may use the same client.
  SchedulerService(asio::any_io_executor executor, std::shared_ptr<redis::Connection> connection,
                   std::shared_ptr<queue::Client> client, SchedulerServiceOptions options);
  ~SchedulerService();  // ends without resigning; call stop() first
  SchedulerService(const SchedulerService&) = delete;
  SchedulerService& operator=(const SchedulerService&) = delete;

  void start();
  // If it leads, stores the virtual times and resigns, so that another coordinator takes over immediately.
  asio::awaitable<void> stop(Deadline deadline);

  bool library_loaded() const;  // since the latest reconnect
  bool leading() const;         // true once the state is rebuilt
  bool leader_known() const;
  bool hears() const;  // false if it leads and receives no events
  // Why this Redis is not used, or the error of the latest request for the leadership; empty: none.
  const std::string& refusal() const;
  bool redis_refused() const;
  std::vector<std::string> warnings() const;  // about Redis, for operators
  // Empty unless leading. `spec` must be complete.
  std::optional<Estimate> estimate(const job::JobSpec& spec, const std::string& tenant) const;
  // Scheduler::waits_for(); empty unless leading.
  std::string waits_for(const queue::UnitRef& unit) const;
  std::int64_t now_us() const;  // Redis' clock

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace ditfleet::scheduling
