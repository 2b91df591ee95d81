// Threads that want the same key at once: one goes, the others wait for what it brings.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "shared/core/result.h"
#include "shared/kernel_cache/entry.h"
#include "shared/kernel_cache/key.h"

namespace ditfleet::kernel_cache {

// Thread safe.
class Flights {
 public:
  using Outcome = Result<std::shared_ptr<const Entry>>;

 private:
  struct Flight {
    std::mutex mutex;
    std::condition_variable landed;
    std::optional<Outcome> outcome;
  };

 public:
  // The one that goes. Its destructor ends the flight, if land() has not, with an error for those who wait.
  class Leader {
   public:
    Leader(Flights& flights, const Key& key, std::shared_ptr<Flight> flight)
        : flights_(&flights), key_(key), flight_(std::move(flight)) {}
    Leader(Leader&& other) noexcept : flights_(other.flights_), key_(other.key_), flight_(std::move(other.flight_)) {}
    Leader& operator=(Leader&&) = delete;
    ~Leader() {
      if (flight_) land(internal_error("[kernel_cache] the thread that compiled this program ended with an exception"));
    }
    void land(Outcome outcome) {
      {
        // From now on newcomers look for themselves.
        const std::lock_guard lock(flights_->mutex_);
        flights_->by_key_.erase(key_);
      }
      {
        const std::lock_guard lock(flight_->mutex);
        flight_->outcome.emplace(std::move(outcome));
      }
      flight_->landed.notify_all();
      flight_.reset();
    }

   private:
    Flights* flights_;
    Key key_;
    std::shared_ptr<Flight> flight_;
  };

  // A leader, or the outcome of the one that went before, once it is there.
  std::pair<std::optional<Leader>, std::optional<Outcome>> join(const Key& key) {
    std::shared_ptr<Flight> flight;
    {
      const std::lock_guard lock(mutex_);
      auto& place = by_key_[key];
      if (!place) {
        place = std::make_shared<Flight>();
        return {Leader(*this, key, place), std::nullopt};
      }
      flight = place;
    }
    std::unique_lock lock(flight->mutex);
    flight->landed.wait(lock, [&] { return flight->outcome.has_value(); });
    return {std::nullopt, *flight->outcome};
  }

 private:
  std::mutex mutex_;
  std::unordered_map<Key, std::shared_ptr<Flight>> by_key_;
};

}  // namespace ditfleet::kernel_cache
