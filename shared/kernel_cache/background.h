// A thread that does what nobody waits for, in order. What it cannot take any more, the caller does itself.
#pragma once

#include <pthread.h>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace ditfleet::kernel_cache {

// Thread safe. Tasks must not throw.
class Background {
 public:
  explicit Background(std::size_t max_waiting) : max_waiting_(max_waiting), thread_([this] { work(); }) {}
  ~Background() {  // after everything that waits has been done
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  void add(std::function<void()> task) {
    {
      const std::lock_guard lock(mutex_);
      if (waiting_.size() < max_waiting_) {
        waiting_.push_back(std::move(task));
        task = nullptr;
      }
    }
    if (task) {
      task();
    } else {
      changed_.notify_all();
    }
  }
  // The same for what may as well not be done: false, and nothing happens, where too much waits.
  bool offer(std::function<void()> task) {
    {
      const std::lock_guard lock(mutex_);
      if (waiting_.size() >= max_waiting_ / 2) return false;
      waiting_.push_back(std::move(task));
    }
    changed_.notify_all();
    return true;
  }
  // Returns once everything added before has been done.
  void flush() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return waiting_.empty() && !busy_; });
  }

 private:
  void work() {
    ::pthread_setname_np(::pthread_self(), "kernels-store");
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return ending_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      {
        const std::function<void()> task = std::move(waiting_.front());
        waiting_.pop_front();
        busy_ = true;
        lock.unlock();
        task();
        // What it owns (locks of files) goes before anyone is told that it is done.
      }
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  const std::size_t max_waiting_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  bool busy_ = false, ending_ = false;
  std::thread thread_;
};

}  // namespace ditfleet::kernel_cache
