// A group of coroutines that can be canceled together. An exception of a coroutine is logged with the coroutine's name.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <memory>
#include <string>

namespace ditfleet {

namespace asio = boost::asio;

// Not thread-safe: use it from one executor, which must be single-threaded or a strand.
// stop() sends total asio cancellation to every coroutine. An await then throws operation_aborted, which is not logged.
class TaskGroup {
 public:
  explicit TaskGroup(asio::any_io_executor executor);
  ~TaskGroup();  // stop(); running coroutines keep the group's shared state alive
  TaskGroup(const TaskGroup&) = delete;
  TaskGroup& operator=(const TaskGroup&) = delete;

  // After stop(), the task is not started.
  void spawn(std::string name, asio::awaitable<void> task);
  void stop();
  bool stopping() const;
  std::size_t running() const;
  // Completes when all coroutines have ended.
  asio::awaitable<void> join();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace ditfleet
