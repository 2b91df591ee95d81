// A thread pool for work whose result is needed later. Unlike std::async, it does not start a thread per task.
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

// Thread-safe. Threads start on demand and run until destruction.
class BackgroundThreads {
 public:
  // At most `most` threads. The name of each thread is the first 15 characters of `name`.
  BackgroundThreads(std::string name, std::size_t most) : name_(name.substr(0, 15)), most_(most) {}
  ~BackgroundThreads();  // finishes all work first
  BackgroundThreads(const BackgroundThreads&) = delete;
  BackgroundThreads& operator=(const BackgroundThreads&) = delete;

  // Tasks start in the order of the calls. The future rethrows exceptions of `work`. Destroying the future does not
  // wait for the task, so `work` may only refer to objects that outlive this object.
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
