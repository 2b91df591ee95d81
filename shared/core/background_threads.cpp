#include "shared/core/background_threads.h"

#include <pthread.h>

namespace ditfleet {

BackgroundThreads::~BackgroundThreads() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void BackgroundThreads::add(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(task));
    if (waiting_.size() > idle_ && threads_.size() < most_) threads_.emplace_back([this] { work(); });
  }
  changed_.notify_one();
}

void BackgroundThreads::work() {
  ::pthread_setname_np(::pthread_self(), name_.c_str());
  std::unique_lock lock(mutex_);
  while (true) {
    ++idle_;
    changed_.wait(lock, [this] { return ending_ || !waiting_.empty(); });
    --idle_;
    if (waiting_.empty()) return;
    auto task = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    task();
    task = nullptr;  // what it holds is destroyed without the lock
    lock.lock();
  }
}

}  // namespace ditfleet
