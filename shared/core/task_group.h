// A group of coroutines. An exception of a coroutine is logged under its name. stop() cancels all, join() waits for
// them.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <memory>
#include <string>

namespace ditfleet {

namespace asio = boost::asio;

// Not thread-safe: use it from one executor, which must be single-threaded or a strand.
// A spawned coroutine receives asio cancellation (total) at stop(); an await then throws
// operation_aborted, which ends it silently.
class TaskGroup {
 public:
  explicit TaskGroup(asio::any_io_executor executor);
  ~TaskGroup();  // stop(); running coroutines keep the group's shared state alive
  TaskGroup(const TaskGroup&) = delete;
  TaskGroup& operator=(const TaskGroup&) = delete;

  // After stop() the task is dropped without being started.
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
