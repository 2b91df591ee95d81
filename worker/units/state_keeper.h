// Keeps what units have denoised so far, so that the next attempt goes on from there: in the store of results, named by
// a key in Redis. Whatever goes wrong here costs the unit only its progress.
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
class StateKeeper {
 public:
  // `interval`: of denoising between two states; 0: none is kept or looked for.
  StateKeeper(queue::Client& queue, results::Store& store, std::chrono::milliseconds interval)
      : queue_(queue), store_(store), interval_(interval) {}

  std::chrono::milliseconds interval() const { return interval_; }

  // The state (pipeline::Generation::go_on_from) that another attempt has kept; empty: none, or one of another model.
  // Sets Unit::kept.
  asio::awaitable<std::string> find(std::shared_ptr<Unit> unit);
  // Keeps the state after this step, and removes the one before. One call at a time for a unit.
  asio::awaitable<void> keep(std::shared_ptr<Unit> unit, int step, std::string state);
  // Removes what is kept of a unit that has ended here.
  asio::awaitable<void> drop(std::shared_ptr<Unit> unit);

 private:
  queue::Client& queue_;
  results::Store& store_;
  const std::chrono::milliseconds interval_;
  LogThrottle log_;
};

}  // namespace ditfleet::worker
