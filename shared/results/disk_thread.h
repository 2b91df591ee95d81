// The one thread that touches the file backend's disk, so that a slow or hanging network folder delays
// neither leases nor heartbeats.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <functional>
#include <memory>
#include <optional>

#include "shared/core/deadline.h"
#include "shared/core/result.h"

namespace ditfleet::results {

namespace asio = boost::asio;

class DiskThread {
 public:
  DiskThread() : pool_(1) {}
  ~DiskThread() { pool_.join(); }  // waits for the work in hand
  DiskThread(const DiskThread&) = delete;
  DiskThread& operator=(const DiskThread&) = delete;

  asio::thread_pool::executor_type executor() { return pool_.get_executor(); }


  // Runs `work` there and returns its value on the caller's executor. Past the deadline it returns
  // kDeadlineExceeded while the work goes on to its end, unheeded: `work` must own all it touches.
  template <class T>
  asio::awaitable<Result<T>> run(std::function<Result<T>()> work, Deadline deadline) {
    struct State {
      explicit State(const asio::any_io_executor& executor) : done(executor) {}
      asio::steady_timer done;  // touched on the caller's executor only
      std::optional<Result<T>> result;
    };
    const auto executor = co_await asio::this_coro::executor;
    auto state = std::make_shared<State>(executor);
    state->done.expires_at(deadline.time_point());
    asio::post(pool_, [state, executor, work = std::move(work)] {
      // The result travels in the posted handler: `state` belongs to the caller's executor.
      asio::post(executor, [state, result = work()]() mutable {
        state->result = std::move(result);
        state->done.cancel();
      });
    });
    boost::system::error_code ignored;
    if (!state->result) co_await state->done.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    if (!state->result) {
      co_return Error{Code::kDeadlineExceeded, "the results folder did not answer in time", {}};
    }
    co_return std::move(*state->result);
  }

 private:
  asio::thread_pool pool_;
};

}  // namespace ditfleet::results
