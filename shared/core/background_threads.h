// A few named threads for work whose result is needed later. Unlike std::async, it does not start a thread per task.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace ditfleet {

// Thread-safe. Threads start when there is work for them and stay until destruction.
class BackgroundThreads {
 public:
  // At most `most` threads, each called `name` (the first 15 characters are kept).
  BackgroundThreads(std::string name, std::size_t most) : name_(name.substr(0, 15)), most_(most) {}
  ~BackgroundThreads();  // finishes all work first
  BackgroundThreads(const BackgroundThreads&) = delete;
  BackgroundThreads& operator=(const BackgroundThreads&) = delete;

  // Work starts in the order in which it was given. The future rethrows what `work` throws. Destroying the future
  // does not wait, so `work` must only refer to objects that outlive this one.
  template <class Work>
  std::future<std::invoke_result_t<Work>> run(Work work) {
    auto task = std::make_shared<std::packaged_task<std::invoke_result_t<Work>()>>(std::move(work));
    auto result = task->get_future();
    add([task] { (*task)(); });
    return result;
  }

 private:
  void add(std::function<void()> task);
  void work();

  const std::string name_;
  const std::size_t most_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  std::size_t idle_ = 0;
  bool ending_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace ditfleet
