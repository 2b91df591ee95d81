// Checkpoints of units: what they have denoised so far, so that the next attempt goes on from there. The state is in
// the store of results, named by a key in Redis. An error here costs the unit only its progress.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <chrono>
#include <string>

#include "shared/core/log_throttle.h"
#include "shared/queue/client.h"
#include "shared/results/store.h"
#include "worker/units/unit.h"

namespace ditfleet::worker {

namespace asio = boost::asio;

// Call every function on the io thread.
class Checkpoints {
 public:
  // `interval`: of denoising between two checkpoints; 0: only paused units have one.
  Checkpoints(queue::Client& queue, results::Store& store, std::chrono::milliseconds interval)
      : queue_(queue), store_(store), interval_(interval) {}

  std::chrono::milliseconds interval() const { return interval_; }

  // The state (pipeline::Generation::go_on_from) that another attempt has stored; empty: none, or one of another model.
  // Sets Unit::checkpoints. An error only if the job has resume_from: it cannot begin without.
  asio::awaitable<Result<std::string>> find(std::shared_ptr<Unit> unit);
  // Stores the state after this step, and removes the checkpoint before. One call at a time for a unit.
  asio::awaitable<void> store(std::shared_ptr<Unit> unit, int step, std::string state);
  // Removes the checkpoint of a unit that has ended here.
  asio::awaitable<void> drop(std::shared_ptr<Unit> unit);
  // Of a unit that this worker has lost: another attempt may go on from the checkpoint, unless the unit has ended.
  asio::awaitable<void> drop_if_ended(std::shared_ptr<Unit> unit);

 private:
  queue::Client& queue_;
  results::Store& store_;
  const std::chrono::milliseconds interval_;
  LogThrottle log_;
};

}  // namespace ditfleet::worker
