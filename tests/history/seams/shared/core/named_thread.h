// In place of shared/core/named_thread.h in this program: the thread is a fiber, which runs under virtual time.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "shared/core/deadline.h"
#include "shared/core/result.h"
#include "tests/history/world.h"

namespace ditfleet {

namespace asio = boost::asio;

class NamedThread {
 public:
  explicit NamedThread(const std::string& name) : name_(name), process_(history::current_process()) {}
  NamedThread(const NamedThread&) = delete;
  NamedThread& operator=(const NamedThread&) = delete;

  asio::io_context::executor_type executor() { return process_->io().get_executor(); }
  void join() {}  // as a process that ends without its threads
  bool busy() const { return tasks_->running > 0; }

  template <class T>
  asio::awaitable<Result<T>> run(std::function<Result<T>()> work, Deadline deadline) {
    struct State {
      explicit State(const asio::any_io_executor& executor) : done(executor) {}
      asio::steady_timer done;
      std::optional<Result<T>> result;
    };
    const asio::any_io_executor executor = co_await asio::this_coro::executor;
    auto state = std::make_shared<State>(executor);
    state->done.expires_at(deadline.time_point());
    ++tasks_->running;
    add([tasks = tasks_, state, executor, work = std::move(work)]() mutable {
      auto result = [&work]() -> Result<T> {
        try {
          return work();
        } catch (const std::exception& e) {
          return unavailable(std::string("an exception ended the work: ") + e.what());
        }
      }();
      --tasks->running;
      asio::post(executor, [state = std::move(state), result = std::move(result)]() mutable {
        state->result.emplace(std::move(result));
        state->done.cancel();
      });
    });
    boost::system::error_code ignored;
    co_await state->done.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    if (!state->result) co_return Error{Code::kDeadlineExceeded, "the thread '" + name_ + "' did not finish in time"};
    co_return std::move(*state->result);
  }

 private:
  struct Tasks {
    std::deque<std::function<void()>> waiting;
    bool has_fiber = false;
    int running = 0;
  };
  void add(std::function<void()> task) {
    tasks_->waiting.push_back(std::move(task));
    if (std::exchange(tasks_->has_fiber, true)) return;
    history::Fiber::start([tasks = tasks_] {
      while (!tasks->waiting.empty()) {
        const auto next = std::move(tasks->waiting.front());
        tasks->waiting.pop_front();
        next();
      }
      tasks->has_fiber = false;
    });
  }

  std::string name_;
  history::Process* process_;
  std::shared_ptr<Tasks> tasks_ = std::make_shared<Tasks>();
};

}  // namespace ditfleet
