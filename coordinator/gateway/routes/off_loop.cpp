#include "coordinator/gateway/routes/off_loop.h"

#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <new>

namespace ditfleet::gateway {

struct OffLoop::Task {
  asio::any_io_executor executor;
  asio::steady_timer ended;  // canceled when the work has ended
  std::int64_t bytes;
  std::function<void()> work;
  std::optional<Result<void>> outcome = {};
};

asio::awaitable<Result<void>> OffLoop::finish(std::string name, std::int64_t bytes, std::function<void()> work) {
  const auto found = tenants_.find(name);
  const std::int64_t own = found == tenants_.end() ? 0 : found->second.bytes;
  if (own > 0 && own + bytes > kShare) {
    co_return Error{.code = Code::kResourceExhausted,
                    .message = "tenant '" + name + "' has " + std::to_string(own) +
                               " bytes of requests that wait to be read, and this one has " + std::to_string(bytes) +
                               "; the limit is " + std::to_string(kShare) + ", so send fewer at the same time",
                    .retry_after = std::chrono::seconds(1)};
  }
  if (bytes_ > 0 && bytes_ + bytes > kMost) {
    co_return Error{.code = Code::kUnavailable,
                    .message = std::to_string(bytes_) + " bytes of requests wait to be read; the limit is " +
                               std::to_string(kMost) + ", so try again shortly",
                    .retry_after = std::chrono::seconds(1)};
  }
  const asio::any_io_executor executor = co_await asio::this_coro::executor;
  const auto task = std::make_shared<Task>(
      executor, asio::steady_timer(executor, asio::steady_timer::time_point::max()), bytes, std::move(work));
  Tenant& tenant = tenants_[name];
  tenant.bytes += bytes;
  bytes_ += bytes;
  tenant.waiting.push_back(task);
  start_next();
  boost::system::error_code ignored;
  co_await task->ended.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  if (!task->outcome) co_return unavailable("the gateway is stopping");
  co_return *task->outcome;
}

void OffLoop::start_next() {
  const auto can_start = [](const Tenant& tenant) { return !tenant.runs && !tenant.waiting.empty(); };
  while (running_ < kThreads) {
    auto next = tenants_.upper_bound(last_);
    for (std::size_t i = 0; i < tenants_.size(); ++i, ++next) {
      if (next == tenants_.end()) next = tenants_.begin();
      if (can_start(next->second)) break;
    }
    if (next == tenants_.end() || !can_start(next->second)) return;
    last_ = next->first;
    next->second.runs = true;
    ++running_;
    auto task = std::move(next->second.waiting.front());
    next->second.waiting.pop_front();
    asio::post(threads_, [this, task = std::move(task), name = last_]() mutable {
      Result<void> outcome;
      try {
        task->work();
      } catch (const std::bad_alloc&) {
        outcome = Error{Code::kOutOfMemory, "the host ran out of memory"};
      } catch (const std::exception& e) {
        outcome = internal_error(std::string("an exception ended the work: ") + e.what());
      }
      const asio::any_io_executor executor = task->executor;
      asio::post(executor, [this, task = std::move(task), outcome = std::move(outcome), name = std::move(name)] {
        --running_;
        bytes_ -= task->bytes;
        const auto tenant = tenants_.find(name);
        tenant->second.runs = false;
        tenant->second.bytes -= task->bytes;
        if (tenant->second.bytes == 0) tenants_.erase(tenant);
        task->outcome = outcome;
        task->ended.cancel();
        start_next();
      });
    });
  }
}

}  // namespace ditfleet::gateway
