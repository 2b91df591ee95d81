// A group of coroutines that can be canceled together, and what happens when one of them fails.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <exception>
#include <functional>
#include <memory>
#include <string>

namespace ditfleet {

namespace asio = boost::asio;

// Which ends of a task, before the group is stopped, end the process. The process is better restarted than left without
// a task that the others rely on.
enum class Vital {
  kNo,      // none: an exception is logged
  kOnce,    // an exception
  kForever  // an exception, and a return: the task is a loop
};

// Ends the process with kExitVitalTask, without destructors, because other threads may be busy. Logs the reason.
inline constexpr int kExitVitalTask = 70;
[[noreturn]] void end_process(const std::string& task, const std::string& reason);

// A handler for asio::co_spawn() that calls end_process() if the coroutine ends by an exception.
std::function<void(std::exception_ptr)> end_process_on_exception(std::string task);

// Not thread-safe: use it from one executor, which must be single-threaded or a strand.
// stop() sends total asio cancellation to every coroutine. An await then throws operation_aborted, which is not logged.
class TaskGroup {
 public:
  explicit TaskGroup(asio::any_io_executor executor);
  ~TaskGroup();  // stop(); running coroutines keep the group's shared state alive
  TaskGroup(const TaskGroup&) = delete;
  TaskGroup& operator=(const TaskGroup&) = delete;

  // After stop(), the task is not started.
  void spawn(std::string name, asio::awaitable<void> task, Vital vital = Vital::kNo);
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
