// Remembers what requests of different sizes need of the device's memory.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include "pipeline/memory/dry_run.h"
#include "pipeline/memory/model_memory.h"

namespace ditfleet::pipeline {

// The bytes at the peak of `stage`, beyond `before`. The caller holds dry_run_mutex().
template <class Stage>
std::int64_t dry_peak_of(std::int64_t before, const Stage& stage) {
  start_dry_peak();
  stage();
  return dry_peak() - before;
}

// Thread-safe.
class MeasuredNeeds {
 public:
  // Calls `measure` for a new size.
  template <class Measure>
  MemoryNeeds of(const RequestSize& size, const Measure& measure) {
    const std::lock_guard lock(mutex_);
    if (const auto known = known_.find(size); known != known_.end()) return known->second;
    if (known_.size() >= kMostSizes) known_.clear();
    return known_[size] = measure(size);
  }

 private:
  static constexpr std::size_t kMostSizes = 1024;
  std::mutex mutex_;
  std::map<RequestSize, MemoryNeeds> known_;
};

}  // namespace ditfleet::pipeline
