#include "coordinator/gateway/connection.h"

#include <sys/socket.h>

#include <boost/asio/buffer.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http/chunk_encode.hpp>
#include <tuple>

namespace ditfleet::gateway {

namespace http = boost::beast::http;
using boost::system::error_code;

void Connection::when_gone(std::function<void()> callback) {
  when_gone_ = std::move(callback);
  if (gone_ && when_gone_) when_gone_();
}

asio::awaitable<bool> Connection::write(std::string bytes) {
  if (gone_ || bytes.empty()) co_return !gone_;
  stream_.expires_after(write_timeout_);
  error_code ec;
  if (chunked_) {
    std::tie(ec, std::ignore) = co_await asio::async_write(stream_, http::make_chunk(asio::buffer(bytes)), kTuple);
  } else {
    std::tie(ec, std::ignore) = co_await asio::async_write(stream_, asio::buffer(bytes), kTuple);
  }
  stream_.expires_never();
  if (ec) gone_ = true;
  co_return !gone_;
}

void Connection::watch(const std::shared_ptr<Connection>& self) {
  stream_.socket().async_wait(tcp::socket::wait_read, [self](error_code ec) {
    if (ec) return;
    char byte;
    const auto n = ::recv(self->stream_.socket().native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (n > 0) return;
    self->gone_ = true;
    if (self->when_gone_) self->when_gone_();
  });
}

void Connection::unwatch() {
  when_gone_ = nullptr;
  error_code ignored;
  if (!gone_) stream_.socket().cancel(ignored);
}

void Connection::close() {
  error_code ignored;
  stream_.socket().close(ignored);
}

}  // namespace ditfleet::gateway
