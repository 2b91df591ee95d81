// A named thread that runs tasks in order, for blocking work such as disk I/O. `top -H` shows the name.
#pragma once

#include <atomic>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "shared/core/deadline.h"
#include "shared/core/result.h"

namespace ditfleet {

namespace asio = boost::asio;

// Thread-safe.
class NamedThread {
 public:
  explicit NamedThread(const std::string& name);  // uses the first 15 characters
  ~NamedThread();                                 // waits until all tasks are done
  NamedThread(const NamedThread&) = delete;
  NamedThread& operator=(const NamedThread&) = delete;

  asio::thread_pool::executor_type executor() { return pool_.get_executor(); }
  void join() { pool_.join(); }  // waits until all tasks are done; there may be no more afterwards
  // Whether work of run() has not ended, even if nobody waits for it any more.
  bool busy() const { return running_ > 0; }

  // Runs `work` on the thread and returns its result on the caller's executor, which must be single-threaded or a
  // strand. Returns kDeadlineExceeded at the deadline, but `work` continues, so it must own everything it uses. An
  // exception of `work` becomes kUnavailable, or kOutOfMemory if memory ran out.
  template <class T>
  asio::awaitable<Result<T>> run(std::function<Result<T>()> work, Deadline deadline) {
    struct State {
      explicit State(const asio::any_io_executor& executor) : done(executor) {}
      asio::steady_timer done;  // touched on the caller's executor only
      std::optional<Result<T>> result;
    };
    const asio::any_io_executor executor = co_await asio::this_coro::executor;
    auto state = std::make_shared<State>(executor);
    state->done.expires_at(deadline.time_point());
    ++running_;
    asio::post(pool_, [this, state, executor, work = std::move(work)]() mutable {
      // The handler owns the result and `state`: the caller's executor may be destroyed before this thread drops a
      // copy.
      auto result = [&work]() -> Result<T> {
        try {
          return work();
        } catch (const std::bad_alloc&) {
          return Error{Code::kOutOfMemory, "the host ran out of memory"};
        } catch (const std::exception& e) {
          return unavailable(std::string("an exception ended the work: ") + e.what());
        }
      }();
      --running_;
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
  std::string name_;
  std::atomic<int> running_ = 0;
  asio::thread_pool pool_;
};

}  // namespace ditfleet
