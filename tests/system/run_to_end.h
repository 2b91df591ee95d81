// A coroutine as a call that blocks.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <exception>
#include <optional>
#include <utility>

namespace ditfleet::testing {

template <class T>
boost::asio::awaitable<void> keep_result(boost::asio::awaitable<T> task, std::optional<T>& result) {
  result.emplace(co_await std::move(task));
}

// Runs `io` on this thread until the coroutine has ended; what it throws, this throws.
template <class T>
T run_to_end(boost::asio::io_context& io, boost::asio::awaitable<T> task) {
  std::optional<T> result;
  std::exception_ptr thrown;
  bool ended = false;
  boost::asio::co_spawn(io, keep_result(std::move(task), result), [&](std::exception_ptr e) {
    thrown = e;
    ended = true;
  });
  io.restart();
  while (!ended && io.run_one() > 0) {
  }
  if (thrown) std::rethrow_exception(thrown);
  return std::move(*result);
}

}  // namespace ditfleet::testing
