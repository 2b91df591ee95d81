#include "shared/redis/transport.h"

#include <netinet/tcp.h>

#include <boost/asio/connect.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/ssl.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <optional>
#include <type_traits>
#include <utility>

namespace ditfleet::redis {
namespace {

using asio::ip::tcp;
using boost::system::error_code;

asio::awaitable<error_code> connect_tcp(tcp::socket& socket, const Endpoint& endpoint) {
  error_code error;
  tcp::resolver resolver(socket.get_executor());
  const auto found = co_await resolver.async_resolve(endpoint.host, std::to_string(endpoint.port),
                                                     asio::redirect_error(asio::use_awaitable, error));
  if (error) co_return error;
  co_await asio::async_connect(socket, found, asio::redirect_error(asio::use_awaitable, error));
  if (error) co_return error;
  error_code ignored;
  socket.set_option(tcp::no_delay(true), ignored);
  socket.set_option(asio::socket_base::keep_alive(true), ignored);
  // A peer that has vanished ends the connection within 15 s, whether it was idle or not.
  const auto set = [&](int option, int value) {
    ::setsockopt(socket.native_handle(), IPPROTO_TCP, option, &value, sizeof value);
  };
  set(TCP_USER_TIMEOUT, 10'000);  // ms
  set(TCP_KEEPIDLE, 5);           // s
  set(TCP_KEEPINTVL, 2);          // s
  co_return error;
}

template <class Stream>
asio::awaitable<std::pair<error_code, std::size_t>> read_from(Stream& stream, asio::mutable_buffer buffer) {
  error_code error;
  const std::size_t size = co_await stream.async_read_some(buffer, asio::redirect_error(asio::use_awaitable, error));
  co_return std::pair(error, size);
}

template <class Socket>
class PlainTransport final : public Transport {
 public:
  PlainTransport(asio::any_io_executor executor, Endpoint endpoint)
      : socket_(std::move(executor)), endpoint_(std::move(endpoint)) {}

  asio::awaitable<error_code> open() override {
    if constexpr (std::is_same_v<Socket, tcp::socket>) {
      co_return co_await connect_tcp(socket_, endpoint_);
    } else {
      error_code error;
      co_await socket_.async_connect(endpoint_.unix_path, asio::redirect_error(asio::use_awaitable, error));
      co_return error;
    }
  }
  asio::awaitable<std::pair<error_code, std::size_t>> read_some(asio::mutable_buffer buffer) override {
    return read_from(socket_, buffer);
  }
  void write(asio::const_buffer buffer, std::function<void(error_code)> done) override {
    asio::async_write(socket_, buffer, [done = std::move(done)](error_code error, std::size_t) { done(error); });
  }
  void close() override {
    error_code ignored;
    socket_.close(ignored);
  }

 private:
  Socket socket_;
  Endpoint endpoint_;
};

class TlsTransport final : public Transport {
 public:
  TlsTransport(asio::any_io_executor executor, Endpoint endpoint)
      : context_(asio::ssl::context::tls_client), endpoint_(std::move(endpoint)) {
    if (endpoint_.tls_ca_file.empty()) {
      context_.set_default_verify_paths(context_error_);
    } else {
      context_.load_verify_file(endpoint_.tls_ca_file, context_error_);
    }
    if (!endpoint_.tls_cert_file.empty()) {
      if (!context_error_) context_.use_certificate_chain_file(endpoint_.tls_cert_file, context_error_);
      if (!context_error_)
        context_.use_private_key_file(endpoint_.tls_key_file, asio::ssl::context::pem, context_error_);
    }
    SSL_CTX_set_min_proto_version(context_.native_handle(), TLS1_2_VERSION);
    stream_.emplace(std::move(executor), context_);
  }

  asio::awaitable<error_code> open() override {
    if (context_error_) co_return context_error_;
    if (error_code error = co_await connect_tcp(stream_->next_layer(), endpoint_)) co_return error;
    error_code error;
    error_code not_an_address;
    asio::ip::make_address(endpoint_.host, not_an_address);
    if (not_an_address) SSL_set_tlsext_host_name(stream_->native_handle(), endpoint_.host.c_str());
    if (endpoint_.tls_verify) {
      stream_->set_verify_mode(asio::ssl::verify_peer, error);
      if (error) co_return error;
      stream_->set_verify_callback(asio::ssl::host_name_verification(endpoint_.host), error);
      if (error) co_return error;
    } else {
      stream_->set_verify_mode(asio::ssl::verify_none, error);
    }
    co_await stream_->async_handshake(asio::ssl::stream_base::client, asio::redirect_error(asio::use_awaitable, error));
    co_return error;
  }
  asio::awaitable<std::pair<error_code, std::size_t>> read_some(asio::mutable_buffer buffer) override {
    return read_from(*stream_, buffer);
  }
  void write(asio::const_buffer buffer, std::function<void(error_code)> done) override {
    asio::async_write(*stream_, buffer, [done = std::move(done)](error_code error, std::size_t) { done(error); });
  }
  void close() override {
    error_code ignored;
    stream_->next_layer().close(ignored);
  }

 private:
  asio::ssl::context context_;
  error_code context_error_;
  Endpoint endpoint_;
  std::optional<asio::ssl::stream<tcp::socket>> stream_;
};

}  // namespace

std::unique_ptr<Transport> Transport::create(asio::any_io_executor executor, const Endpoint& endpoint) {
  if (!endpoint.unix_path.empty()) {
    return std::make_unique<PlainTransport<asio::local::stream_protocol::socket>>(std::move(executor), endpoint);
  }
  if (endpoint.tls) return std::make_unique<TlsTransport>(std::move(executor), endpoint);
  return std::make_unique<PlainTransport<tcp::socket>>(std::move(executor), endpoint);
}

}  // namespace ditfleet::redis
