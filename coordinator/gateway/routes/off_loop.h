// Threads for work on clients' bytes that would delay every other request and the scheduler, which share one executor:
// parsing, decoding, hashing and serializing.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/thread_pool.hpp>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "shared/core/result.h"

namespace ditfleet::gateway {

namespace asio = boost::asio;

// Call every function on the gateway's executor, which must not run after this object's end.
//
// Work runs tenant by tenant in turn, on one thread for each, so that a tenant delays another one by one piece of work
// at most while a thread is free.
class OffLoop {
 public:
  static constexpr std::int64_t kSmall = 16 << 10;   // work on fewer bytes runs on the caller's executor
  static constexpr std::int64_t kMost = 256 << 20;   // bytes of all work that has not ended
  static constexpr std::int64_t kShare = kMost / 4;  // of one tenant; a single piece of work may have any size

  ~OffLoop() { threads_.join(); }

  // Returns the result of `work`, which reads `bytes` bytes and owns all it uses: it may outlive the caller.
  // Errors: kResourceExhausted (the tenant's share is full), kUnavailable (the threads are busy with other tenants, or
  // the gateway stops), kOutOfMemory, and those of `work`.
  template <class T>
  asio::awaitable<Result<T>> run(std::string tenant, std::size_t bytes, std::function<Result<T>()> work) {
    if (static_cast<std::int64_t>(bytes) <= kSmall) co_return work();
    auto result = std::make_shared<std::optional<Result<T>>>();
    std::function<void()> task = [result, work = std::move(work)]() mutable {
      result->emplace(work());
      work = nullptr;  // what it owns is destroyed on this thread, too
    };
    auto done = co_await finish(std::move(tenant), static_cast<std::int64_t>(bytes), std::move(task));
    if (!done) co_return done.error();
    co_return std::move(**result);
  }

 private:
  struct Task;
  struct Tenant {
    std::deque<std::shared_ptr<Task>> waiting;
    std::int64_t bytes = 0;
    bool runs = false;
  };
  static constexpr std::size_t kThreads = 2;

  asio::awaitable<Result<void>> finish(std::string tenant, std::int64_t bytes, std::function<void()> task);
  void start_next();

  std::map<std::string, Tenant> tenants_;  // that have work
  std::string last_;                       // whose work was started last
  std::size_t running_ = 0;
  std::int64_t bytes_ = 0;
  asio::thread_pool threads_{kThreads};
};

}  // namespace ditfleet::gateway
