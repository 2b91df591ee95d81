#include "shared/core/task_group.h"

#include <spdlog/spdlog.h>

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/system/system_error.hpp>
#include <cstdlib>
#include <list>
#include <memory>

namespace ditfleet {
namespace {

// Empty if the task returned, or was canceled by a group that is stopping.
std::string failure_of(const std::exception_ptr& thrown, bool stopping) {
  if (!thrown) return {};
  try {
    std::rethrow_exception(thrown);
  } catch (const boost::system::system_error& e) {
    return e.code() == asio::error::operation_aborted && stopping ? std::string() : e.what();
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an unknown exception";
  }
}

}  // namespace

void end_process(const std::string& task, const std::string& reason) {
  spdlog::critical("task '{}' {}; ending this process, which cannot work without it", task, reason);
  spdlog::shutdown();
  std::_Exit(kExitVitalTask);
}

std::function<void(std::exception_ptr)> end_process_on_exception(std::string task) {
  return [task = std::move(task)](const std::exception_ptr& thrown) {
    if (thrown) end_process(task, "ended with " + failure_of(thrown, false));
  };
}

struct TaskGroup::State {
  explicit State(asio::any_io_executor e) : executor(std::move(e)), ended(executor) {
    ended.expires_at(asio::steady_timer::time_point::max());
  }
  asio::any_io_executor executor;
  asio::steady_timer ended;  // canceled to wake join() whenever a task ends
  std::list<asio::cancellation_signal> signals;
  bool stopping = false;

  // stop() from outside the executor reaches the task through a queued handler that refers to the signal (co_spawn
  // dispatches it). The task can end before that handler runs, so the signal is destroyed after it.
  void remove(std::list<asio::cancellation_signal>::iterator signal) {
    std::list<asio::cancellation_signal> gone;
    gone.splice(gone.begin(), signals, signal);
    if (stopping) asio::post(executor, [gone = std::move(gone)] {});
  }
};

TaskGroup::TaskGroup(asio::any_io_executor executor) : state_(std::make_shared<State>(std::move(executor))) {}
TaskGroup::~TaskGroup() { stop(); }

void TaskGroup::spawn(std::string name, asio::awaitable<void> task, Vital vital) {
  if (state_->stopping) return;
  const auto signal = state_->signals.emplace(state_->signals.end());
  asio::co_spawn(state_->executor, std::move(task),
                 asio::bind_cancellation_slot(signal->slot(), [state = state_, signal, name = std::move(name),
                                                               vital](const std::exception_ptr& thrown) {
                   const std::string failure = failure_of(thrown, state->stopping);
                   if (!failure.empty() && vital != Vital::kNo && !state->stopping)
                     end_process(name, "ended with " + failure);
                   if (!failure.empty()) spdlog::error("task '{}' ended with {}", name, failure);
                   if (vital == Vital::kForever && !state->stopping) end_process(name, "returned");
                   state->remove(signal);
                   state->ended.cancel();
                 }));
}

void TaskGroup::stop() {
  if (state_->stopping) return;
  state_->stopping = true;
  // emit() can end a task at once, which erases its signal: advance the iterator first.
  for (auto it = state_->signals.begin(); it != state_->signals.end();) {
    auto& signal = *it++;
    signal.emit(asio::cancellation_type::terminal);
  }
}

bool TaskGroup::stopping() const { return state_->stopping; }
std::size_t TaskGroup::running() const { return state_->signals.size(); }

asio::awaitable<void> TaskGroup::join() {
  auto state = state_;
  while (!state->signals.empty()) {
    boost::system::error_code ignored;
    co_await state->ended.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  }
}

}  // namespace ditfleet
