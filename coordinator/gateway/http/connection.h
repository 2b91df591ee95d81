// One client of the server: its socket, and a watch that detects a disconnect while a response is prepared.
//
// Call every function on the server's executor (server.h).
#pragma once

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/ip/address.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "coordinator/gateway/http/http.h"

namespace ditfleet::gateway {

constexpr auto kTuple = asio::as_tuple(asio::use_awaitable);

// Size limit of a connection's read buffer. It is larger than the limit for headers, and also bounds the lines within a
// body (chunk extensions, trailers), because the parser consumes a line only once it is complete.
constexpr std::size_t kBufferBytes = 64u << 10;

// A TCP stream with timeouts, under TLS if `tls` is given. Models Asio's AsyncReadStream and AsyncWriteStream.
class ClientStream {
 public:
  using tcp = asio::ip::tcp;
  using Tcp = boost::beast::tcp_stream;
  using executor_type = asio::any_io_executor;

  ClientStream(tcp::socket socket, asio::ssl::context* tls) : tcp_(std::move(socket)) {
    if (tls) tls_.emplace(tcp_, *tls);
  }
  asio::any_io_executor get_executor() { return tcp_.get_executor(); }
  tcp::socket& socket() { return tcp_.socket(); }
  void expires_after(std::chrono::milliseconds time) { tcp_.expires_after(time); }
  void expires_never() { tcp_.expires_never(); }
  asio::ssl::stream<Tcp&>* tls() { return tls_ ? &*tls_ : nullptr; }

  template <class Buffers, class Token>
  auto async_read_some(const Buffers& buffers, Token&& token) {
    return tls_ ? tls_->async_read_some(buffers, std::forward<Token>(token))
                : tcp_.async_read_some(buffers, std::forward<Token>(token));
  }
  template <class Buffers, class Token>
  auto async_write_some(const Buffers& buffers, Token&& token) {
    return tls_ ? tls_->async_write_some(buffers, std::forward<Token>(token))
                : tcp_.async_write_some(buffers, std::forward<Token>(token));
  }

 private:
  Tcp tcp_;
  std::optional<asio::ssl::stream<Tcp&>> tls_;
};

class Connection final : public Sink {
 public:
  using tcp = asio::ip::tcp;
  using Stream = ClientStream;

  // `write_timeout` limits one write(). `tls`, if not null, must outlive the connection.
  Connection(tcp::socket socket, std::chrono::milliseconds write_timeout, asio::ssl::context* tls = nullptr);

  Stream& stream() { return stream_; }
  boost::beast::flat_buffer& buffer() { return buffer_; }
  bool idle = false;  // between two requests
  // Size of the response that is being written, and when the write started.
  std::size_t unread_bytes = 0;
  std::chrono::steady_clock::time_point writes_since;
  // Since when the server waits for the client: for a request, for the rest of one, or for the end of a refused one.
  // Empty while a request is served.
  std::optional<std::chrono::steady_clock::time_point> waits_since;
  bool uploading = false;  // waiting for the next piece of a streamed body
  // Size of the body that is being read.
  std::size_t arriving_bytes = 0;
  // Above the limit of connections: only the vital routes are served.
  bool guest = false;
  // The client's IPv4 address or IPv6 /64 network, and whether it is this host.
  asio::ip::address peer;
  bool from_loopback = false;

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
