// One client of the server: its socket, and what is watched on it while a response takes its time.
//
// Threads: those of the server (server.h).
#pragma once

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/basic_stream.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/rate_policy.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "coordinator/gateway/http.h"

namespace ditfleet::gateway {

constexpr auto kTuple = asio::as_tuple(asio::use_awaitable);

class Connection final : public Sink {
 public:
  using tcp = asio::ip::tcp;
  using Stream = boost::beast::basic_stream<tcp, asio::any_io_executor, boost::beast::unlimited_rate_policy>;

  // write_timeout: of one write().
  Connection(tcp::socket socket, std::chrono::milliseconds write_timeout) : stream_(std::move(socket)), write_timeout_(write_timeout) {}

  Stream& stream() { return stream_; }
  boost::beast::flat_buffer& buffer() { return buffer_; }
  bool idle = false;  // between two requests

  // --- Sink ---
  bool gone() const override { return gone_; }
  void when_gone(std::function<void()> callback) override;
  asio::awaitable<bool> write(std::string bytes) override;
  void set_chunked(bool chunked) { chunked_ = chunked; }

  // Watches for the client to close while nothing is read from it. A client that has sent the next request
  // already is not watched any more.
  void watch(const std::shared_ptr<Connection>& self);
  void unwatch();
  void close();

 private:
  Stream stream_;
  std::chrono::milliseconds write_timeout_;
  boost::beast::flat_buffer buffer_;
  std::function<void()> when_gone_;
  bool gone_ = false, chunked_ = false;
};

}  // namespace ditfleet::gateway
