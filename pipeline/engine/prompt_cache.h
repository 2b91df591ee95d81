// Caches the embeddings of the last few prompts: the units of a job have the same prompt, and a negative prompt rarely
// changes.
#pragma once

#include <cstddef>
#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <utility>

namespace ditfleet::pipeline {

// Least-recently-used cache. Thread-safe. make() runs without the lock, so two callers can compute the same value.
template <class Value>
class PromptCache {
 public:
  explicit PromptCache(std::size_t capacity) : capacity_(capacity) {}

  Value get(const std::string& key, const std::function<Value()>& make) {
    {
      const std::lock_guard lock(mutex_);
      for (auto it = entries_.begin(); it != entries_.end(); ++it)
        if (it->first == key) {
          entries_.splice(entries_.begin(), entries_, it);
          return it->second;
        }
    }
    Value value = make();
    const std::lock_guard lock(mutex_);
    entries_.emplace_front(key, value);
    if (entries_.size() > capacity_) entries_.pop_back();
    return value;
  }

 private:
  const std::size_t capacity_;
  std::mutex mutex_;
  std::list<std::pair<std::string, Value>> entries_;  // most recently used first
};

}  // namespace ditfleet::pipeline
