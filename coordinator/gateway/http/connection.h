// One client of the server: its socket, and a watch that detects a disconnect while a response is prepared.
//
// Call every function on the server's executor (server.h).
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
#include <optional>
#include <string>
#include <string_view>

#include "coordinator/gateway/http/http.h"

namespace ditfleet::gateway {

constexpr auto kTuple = asio::as_tuple(asio::use_awaitable);

// Size limit of a connection's read buffer. It is larger than the limit for headers, and also bounds the lines within a
// body (chunk extensions, trailers), because the parser consumes a line only once it is complete.
constexpr std::size_t kBufferBytes = 64u << 10;

class Connection final : public Sink {
 public:
  using tcp = asio::ip::tcp;
  using Stream = boost::beast::basic_stream<tcp, asio::any_io_executor, boost::beast::unlimited_rate_policy>;

  // `write_timeout` limits one write().
  Connection(tcp::socket socket, std::chrono::milliseconds write_timeout)
      : stream_(std::move(socket)), write_timeout_(write_timeout) {}

  Stream& stream() { return stream_; }
  boost::beast::flat_buffer& buffer() { return buffer_; }
  bool idle = false;  // between two requests
  // Size of the response that is being written, and when the write started.
  std::size_t unread_bytes = 0;
  std::chrono::steady_clock::time_point writes_since;
  // When the connection started to wait for a complete request head. Empty while a request is served.
  std::optional<std::chrono::steady_clock::time_point> awaits_head_since;

  // --- Sink ---
  bool gone() const override { return gone_; }
  void when_gone(std::function<void()> callback) override;
  asio::awaitable<bool> write(std::string bytes) override;
  void abort() override { close(), leave(); }
  void set_chunked(bool chunked) { chunked_ = chunked; }

  // Detects that the client disconnects while nothing is read from it. The watch ends when the client sends its next
  // request. A client that shut down its sending side may still read, which TCP does not distinguish from a close. The
  // server sends such a client `probe`, bytes that it ignores. If the client is gone, a reset follows. An empty probe
  // defers this check to the next write.
  void watch(const std::shared_ptr<Connection>& self, std::string_view probe);
  void unwatch();
  void close();

 private:
  void wait_for_end_of_requests(const std::shared_ptr<Connection>& self, unsigned watch);
  void wait_for_reset(const std::shared_ptr<Connection>& self, unsigned watch);
  void leave();
  void send_probe();

  Stream stream_;
  std::chrono::milliseconds write_timeout_;
  boost::beast::flat_buffer buffer_{kBufferBytes};
  std::function<void()> when_gone_;
  std::string probe_;
  bool gone_ = false, chunked_ = false, writing_ = false;
  unsigned watch_ = 0;      // generation; handlers of an earlier watch do nothing
  bool probe_due_ = false;  // after the write in progress
};

}  // namespace ditfleet::gateway
