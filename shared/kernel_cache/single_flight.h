// Single flight: if several threads concurrently need the same key, one does the work and the others wait for its
// result.
#pragma once

#include <future>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "shared/core/result.h"
#include "shared/kernel_cache/entry.h"
#include "shared/kernel_cache/key.h"

namespace ditfleet::kernel_cache {

// Thread-safe.
class SingleFlight {
 public:
  using Outcome = Result<std::shared_ptr<const Entry>>;

  // Runs `work`, or, if another thread is already working on `key`, waits for its result and sets `shared`. If `work`
  // throws, the exception is rethrown, and waiting threads get kInternal.
  template <class Work>
  Outcome run(const Key& key, const Work& work, bool& shared) {
    std::promise<Outcome> promise;
    {
      std::unique_lock lock(mutex_);
      const auto [flight, first] = by_key_.try_emplace(key);
      if (!first) {
        shared = true;
        const std::shared_future<Outcome> result = flight->second;
        lock.unlock();
        return result.get();
      }
      flight->second = promise.get_future().share();
    }
    Outcome outcome = internal_error("[kernel_cache] the thread that compiled this program threw an exception");
    try {
      outcome = work();
    } catch (...) {
      land(key, promise, outcome);
      throw;
    }
    land(key, promise, outcome);
    return outcome;
  }

 private:
  void land(const Key& key, std::promise<Outcome>& promise, const Outcome& outcome) {
    {
      const std::lock_guard lock(mutex_);
      by_key_.erase(key);
    }
    promise.set_value(outcome);
  }

  std::mutex mutex_;
  std::unordered_map<Key, std::shared_future<Outcome>> by_key_;
};

}  // namespace ditfleet::kernel_cache
