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
#include <exception>
#include <list>
#include <memory>

namespace ditfleet {

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

void TaskGroup::spawn(std::string name, asio::awaitable<void> task) {
  if (state_->stopping) return;
  const auto signal = state_->signals.emplace(state_->signals.end());
  asio::co_spawn(state_->executor, std::move(task),
                 asio::bind_cancellation_slot(
                     signal->slot(), [state = state_, signal, name = std::move(name)](std::exception_ptr thrown) {
                       if (thrown) {
                         try {
                           std::rethrow_exception(thrown);
                         } catch (const boost::system::system_error& e) {
                           if (e.code() != asio::error::operation_aborted || !state->stopping) {
                             spdlog::error("task '{}' ended with {}", name, e.what());
                           }
                         } catch (const std::exception& e) {
                           spdlog::error("task '{}' ended with {}", name, e.what());
                         } catch (...) {
                           spdlog::error("task '{}' ended with an unknown exception", name);
                         }
                       }
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
