#include "coordinator/gateway/http/connection.h"

#include <poll.h>
#include <sys/socket.h>

#include <boost/asio/buffer.hpp>
#include <boost/asio/ip/network_v6.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/buffers_to_string.hpp>
#include <boost/beast/http/chunk_encode.hpp>
#include <cerrno>
#include <tuple>

namespace ditfleet::gateway {

namespace http = boost::beast::http;
using boost::system::error_code;

namespace {

constexpr std::chrono::milliseconds kLookAgain{500};  // whether a TLS client that sent something has closed its side

}  // namespace

Connection::Connection(tcp::socket socket, std::chrono::milliseconds write_timeout, asio::ssl::context* tls)
    : stream_(std::move(socket), tls), write_timeout_(write_timeout) {
  error_code unknown;
  peer = stream_.socket().remote_endpoint(unknown).address();
  if (peer.is_v6() && peer.to_v6().is_v4_mapped()) peer = asio::ip::make_address_v4(asio::ip::v4_mapped, peer.to_v6());
  from_loopback = peer.is_loopback();
  if (peer.is_v6()) peer = asio::ip::network_v6(peer.to_v6(), 64).network();
}

void Connection::when_gone(std::function<void()> callback) {
  when_gone_ = std::move(callback);
  if (gone_ && when_gone_) when_gone_();
}

asio::awaitable<bool> Connection::write(std::string bytes) {
  if (gone_ || bytes.empty()) co_return !gone_;
  stream_.expires_after(write_timeout_);
  writing_ = true;
  error_code ec;
  if (chunked_) {
    std::tie(ec, std::ignore) = co_await asio::async_write(stream_, http::make_chunk(asio::buffer(bytes)), kTuple);
  } else {
    std::tie(ec, std::ignore) = co_await asio::async_write(stream_, asio::buffer(bytes), kTuple);
  }
  stream_.expires_never();
  writing_ = false;
  if (ec) gone_ = true;
  if (probe_due_) send_probe();
  co_return !gone_;
}

void Connection::watch(const std::shared_ptr<Connection>& self, std::string_view probe) {
  probe_ = probe;
  if (chunked_ && !probe.empty()) probe_ = boost::beast::buffers_to_string(http::make_chunk(asio::buffer(probe)));
  wait_for_end_of_requests(self, ++watch_);
}

// The handler checks the generation, because it may already be queued when unwatch() is called.
void Connection::wait_for_end_of_requests(const std::shared_ptr<Connection>& self, unsigned watch) {
  stream_.socket().async_wait(tcp::socket::wait_read, [self, watch](error_code ec) {
    if (ec || watch != self->watch_) return;
    char byte;
    const int fd = self->stream_.socket().native_handle();
    const auto n = ::recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (self->stream_.tls()) {
      // What arrives is most likely TLS' farewell. A probe would have to be encrypted, so a half-closed client is gone.
      pollfd ended{fd, POLLRDHUP, 0};
      if (::poll(&ended, 1, 0) > 0) return self->leave();
      const auto later = std::make_shared<asio::steady_timer>(self->stream_.get_executor(), kLookAgain);
      return later->async_wait([self, watch, later](error_code) {
        if (watch == self->watch_) self->wait_for_end_of_requests(self, watch);
      });
    }
    if (n > 0) return;
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return self->wait_for_end_of_requests(self, watch);
    if (n < 0) return self->leave();
    self->stream_.socket().async_wait(tcp::socket::wait_error, [self, watch](error_code reset) {
      if (!reset && watch == self->watch_) self->leave();
    });
    self->probe_due_ = true;
    if (!self->writing_) self->send_probe();
  });
}

// Called only between two writes. The few bytes fit into the socket's buffer unless the client has not read for long,
// which the write timeout detects.
void Connection::send_probe() {
  probe_due_ = false;
  if (!probe_.empty())
    (void)!::send(stream_.socket().native_handle(), probe_.data(), probe_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
}

void Connection::leave() {
  gone_ = true;
  if (when_gone_) when_gone_();
}

void Connection::unwatch() {
  ++watch_;
  when_gone_ = nullptr;
  error_code ignored;
  if (!gone_) stream_.socket().cancel(ignored);
}

void Connection::close() {
  error_code ignored;
  stream_.socket().close(ignored);
}

}  // namespace ditfleet::gateway
