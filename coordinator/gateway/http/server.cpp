#include "coordinator/gateway/http/server.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <boost/asio/bind_executor.hpp>
#include <boost/asio/buffer.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http.hpp>
#include <cstring>
#include <optional>
#include <string_view>
#include <tuple>

#include "coordinator/gateway/http/connection.h"
#include "coordinator/gateway/http/connection_set.h"
#include "coordinator/gateway/http/http_metrics.h"
#include "coordinator/gateway/http/reading.h"
#include "coordinator/gateway/http/streamed_body.h"
#include "shared/core/certificate.h"
#include "shared/core/listen_address.h"
#include "shared/core/task_group.h"

namespace ditfleet::gateway {
namespace {

namespace beast = boost::beast;
namespace http = boost::beast::http;
using tcp = asio::ip::tcp;
using Stream = Connection::Stream;
using boost::system::error_code;

// How long and how much is read and discarded after answering a request that was not read completely. Closing at once
// would send a reset, and the client might lose the answer.
constexpr std::chrono::milliseconds kLingerTime{2000};
constexpr std::size_t kLingerBytes = 8u << 20;
constexpr std::size_t kSmallAnswer = 64u << 10;  // sent even if too many answers are unread

// TLS 1.2 or later with this certificate chain and private key.
Result<std::unique_ptr<asio::ssl::context>> tls_context(const std::string& cert_file, const std::string& key_file) {
  const auto end = check_certificate("gateway", cert_file, key_file);
  if (!end) return end.error();
  auto context = std::make_unique<asio::ssl::context>(asio::ssl::context::tls_server);
  SSL_CTX_set_min_proto_version(context->native_handle(), TLS1_2_VERSION);
  SSL_CTX_set_options(context->native_handle(), SSL_OP_NO_RENEGOTIATION);
  boost::system::error_code ec;
  context->use_certificate_chain_file(cert_file, ec);
  if (!ec) context->use_private_key_file(key_file, asio::ssl::context::pem, ec);
  if (ec) return invalid_argument("gateway.tls_cert_file: '" + cert_file + "': " + ec.message());  // just replaced
  show_certificate_expiry(*end);
  return context;
}

class HttpServer final : public Server, public std::enable_shared_from_this<HttpServer> {
 public:
  HttpServer(asio::any_io_executor executor, ServerOptions options, ServerHandlers handlers)
      : executor_(executor),
        options_(options),
        handlers_(std::move(handlers)),
        acceptor_(executor),
        connections_({.connections = static_cast<std::size_t>(options.max_connections),
                      .connections_per_peer = static_cast<std::size_t>(options.max_connections_per_peer > 0
                                                                           ? options.max_connections_per_peer
                                                                           : std::max(1, options.max_connections / 4)),
                      .unread_bytes = options.max_unread_bytes,
                      .arriving_bytes = std::max(options.max_arriving_bytes, 4 * options.max_body_bytes)}),
        tasks_(executor) {}

  Result<void> listen(const std::string& text) override {
    auto address = ListenAddress::parse(text, "gateway.listen");
    if (!address) return address.error();
    if (!options_.tls_cert_file.empty()) {
      auto tls = tls_context(options_.tls_cert_file, options_.tls_key_file);
      if (!tls) return tls.error();
      tls_ = std::move(*tls);
    }
    error_code ec;
    tcp::resolver resolver(executor_);
    const auto found = resolver.resolve(address->host, std::to_string(address->port), tcp::resolver::passive, ec);
    if (ec || found.empty()) return unavailable("cannot listen on '" + text + "': unknown host (" + ec.message() + ")");
    const tcp::endpoint endpoint = found.begin()->endpoint();
    acceptor_.open(endpoint.protocol(), ec);
    if (!ec) acceptor_.set_option(asio::socket_base::reuse_address(true), ec);
    if (!ec) acceptor_.bind(endpoint, ec);
    if (!ec) acceptor_.listen(asio::socket_base::max_listen_connections, ec);
    if (ec) {
      error_code ignored;
      acceptor_.close(ignored);
      const char* advice = ec == asio::error::address_in_use
                               ? "; another program listens on it: choose another port, or 0 for a free one"
                           : ec == asio::error::access_denied ? "; ports below 1024 need privileges: choose another"
                                                              : "";
      return unavailable("cannot listen on '" + text + "': " + ec.message() + advice);
    }
    return {};
  }

  int port() const override {
    error_code ec;
    return acceptor_.local_endpoint(ec).port();
  }

  std::string local_url() const override {
    error_code ec;
    const auto address = acceptor_.local_endpoint(ec).address();
    return ListenAddress{address.to_string(), port()}.local_url(tls_ != nullptr);
  }

  asio::awaitable<void> run() override {
    while (!stopping_) {
      auto [ec, socket] = co_await acceptor_.async_accept(kTuple);
      if (stopping_) break;
      if (ec) {
        if (ec == asio::error::operation_aborted) break;
        // Most likely out of file descriptors; wait until some are free.
        spdlog::warn("cannot accept a connection: {}", ec.message());
        asio::steady_timer pause(executor_, std::chrono::milliseconds(100));
        co_await pause.async_wait(kTuple);
        continue;
      }
      error_code ignored;
      socket.set_option(tcp::no_delay(true), ignored);
      auto connection = std::make_shared<Connection>(std::move(socket), options_.write_timeout, tls_.get());
      tasks_.spawn("http connection", serve(shared_from_this(), std::move(connection)));
    }
    co_await tasks_.join();
  }

  asio::awaitable<void> stop(Deadline deadline) override {
    stopping_ = true;
    error_code ignored;
    acceptor_.close(ignored);
    for (const auto& connection : connections_.all()) {
      if (connection->idle) connection->close();
    }
    while (tasks_.running() > 0 && !deadline.passed()) {
      asio::steady_timer pause(executor_, std::chrono::milliseconds(10));
      co_await pause.async_wait(kTuple);
    }
    tasks_.stop();
    // A handler that ignores cancellation still ends when its socket is closed.
    for (const auto& connection : connections_.all()) connection->close();
    co_await tasks_.join();
  }

 private:
  struct Incoming {
    Request request;
    std::shared_ptr<StreamedBody> streamed = {};
    bool keep = false, http_1_0 = false;
  };

  // What became of reading a request. None: the client is gone, or its connection was closed for another one.
  struct ReadOutcome {
    std::optional<Incoming> incoming = {};
    std::optional<Response> refusal = {};
  };

  // Keeps the set of open connections and the gauge correct however serve() ends.
  struct Listed {
    Listed(HttpServer& server, std::shared_ptr<Connection> c) : server_(server), connection_(std::move(c)) {
      server_.connections_.add(connection_);
      count_connections(1);
    }
    ~Listed() {
      server_.connections_.remove(connection_);
      count_connections(-1);
    }
    Listed(const Listed&) = delete;
    Listed& operator=(const Listed&) = delete;
    HttpServer& server_;
    std::shared_ptr<Connection> connection_;
  };

  asio::awaitable<void> serve(std::shared_ptr<HttpServer> self, std::shared_ptr<Connection> connection) {
    const Listed listed(*self, connection);
    Stream& stream = connection->stream();
    connection->waits_since = Deadline::Clock::now();
    if (stream.tls()) {
      stream.expires_after(options_.header_timeout);
      auto [ec] = co_await stream.tls()->async_handshake(asio::ssl::stream_base::server, kTuple);
      if (ec) co_return;
    }
    while (!stopping_) {
      connection->waits_since = Deadline::Clock::now();
      if (connection->buffer().size() == 0) {
        connection->idle = true;
        stream.expires_after(options_.idle_timeout);
        auto [ec, read] = co_await stream.async_read_some(connection->buffer().prepare(4096), kTuple);
        connection->idle = false;
        if (ec) break;
        connection->buffer().commit(read);
        if (connection->waits_since) connection->waits_since = Deadline::Clock::now();
      }
      auto [incoming, refusal] = co_await read_request(connection);
      if (refusal) co_await refuse(*connection, *refusal);
      if (!incoming) co_return;
      const bool head = incoming->request.method == "HEAD";
      const bool http_1_0 = incoming->http_1_0;
      Response response = co_await handlers_.request(std::move(incoming->request));
      if (response.later) {
        // HTTP/1.0 has no interim responses, so such a client is only found gone when it is answered.
        connection->watch(connection, http_1_0 ? "" : kContinue);
        const auto later = std::move(response.later);
        response = co_await later(*connection);
        connection->unwatch();
        if (connection->gone()) break;
      }
      // The unread rest of a body would be taken for the next request.
      const bool unread = incoming->streamed && !incoming->streamed->done();
      const bool keep = incoming->keep && !stopping_ && !unread && !connection->guest;
      if (response.stream) {
        co_await write_stream(connection, response, http_1_0);
        // Opening a new connection is simpler than finding out whether the client still listens.
        break;
      }
      if (!co_await write_response(*connection, response, head, keep, http_1_0)) break;
      if (unread) {
        co_await linger(*connection);
        co_return;
      }
      if (!keep) break;
    }
    if (stream.tls()) {
      stream.expires_after(kLingerTime);
      co_await stream.tls()->async_shutdown(kTuple);
    }
    error_code ignored;
    stream.socket().shutdown(tcp::socket::shutdown_both, ignored);
  }

  // Skips empty lines before a request (RFC 9112 §2.2).
  asio::awaitable<error_code> skip_empty_lines(Connection& connection) {
    auto& buffer = connection.buffer();
    for (;;) {
      while (buffer.size() >= 2 && std::memcmp(buffer.data().data(), "\r\n", 2) == 0) buffer.consume(2);
      const bool half = buffer.size() == 1 && *static_cast<const char*>(buffer.data().data()) == '\r';
      if (buffer.size() > 0 && !half) co_return error_code();
      auto [ec, read] = co_await connection.stream().async_read_some(buffer.prepare(4096), kTuple);
      if (ec) co_return ec;
      buffer.commit(read);
    }
  }

  // Reads a request, or only its head if the handler streams the body.
  asio::awaitable<ReadOutcome> read_request(std::shared_ptr<Connection> shared) {
    Connection& connection = *shared;
    Stream& stream = connection.stream();
    const auto refused = [this](const ReadProblem& problem) {
      return ReadOutcome{.refusal = handlers_.refuse(problem.status, problem.message, problem.code)};
    };
    const auto failed = [&](const error_code& ec) {
      if (ec == http::error::body_limit)
        return refused({413,
                        "the body is larger than " + std::to_string(options_.max_body_bytes) +
                            " bytes (gateway.max_body_bytes); send images to POST /v1/uploads and their ids here",
                        "payload_too_large"});
      return is_protocol_error(ec) ? refused(describe(ec)) : ReadOutcome{};
    };
    http::request_parser<http::empty_body> head;
    head.header_limit(options_.max_header_bytes);
    head.body_limit(boost::none);
    error_code ec;
    bool late = false;
    {
      const ReadLimit limit(shared, options_.header_timeout);
      ec = co_await skip_empty_lines(connection);
      if (!ec) std::tie(ec, std::ignore) = co_await http::async_read_header(stream, connection.buffer(), head, kTuple);
      late = ec && limit.passed();
    }
    if (!connection.waits_since) co_return ReadOutcome{};  // evicted for another connection
    if (late) co_return refused(head_is_late());
    if (ec) co_return failed(ec);
    if (auto problem = problem_of(head.get())) co_return refused(*problem);
    auto request = request_of(head.get());
    if (!request) co_return refused({400, request.error().message, "bad_request"});
    Incoming incoming{
        .request = std::move(*request), .keep = head.get().keep_alive(), .http_1_0 = head.get().version() == 10};
    incoming.request.from_loopback = connection.from_loopback;
    if (connection.guest && connections_.has_place_for(connection)) connection.guest = false;
    if (connection.guest && !(handlers_.is_vital && handlers_.is_vital(incoming.request)))
      co_return refused({503, "too many connections; try again shortly", "too_many_connections"});
    if (handlers_.streams && handlers_.streams(incoming.request)) {
      connection.waits_since.reset();
      incoming.streamed = std::make_shared<StreamedBody>(std::move(shared), std::move(head), options_.piece_timeout,
                                                         options_.slow_grace);
      incoming.request.stream = incoming.streamed;
      co_return ReadOutcome{.incoming = std::move(incoming)};
    }
    if (const auto length = head.content_length(); length && *length > options_.max_body_bytes)
      co_return failed(http::error::body_limit);
    if (!head.is_done() && handlers_.refuse_head) {
      if (auto refusal = handlers_.refuse_head(incoming.request)) co_return ReadOutcome{.refusal = std::move(refusal)};
    }
    const std::uint64_t expected = head.is_done() ? 0 : head.content_length().value_or(options_.max_body_bytes);
    const auto counted = connections_.count_arriving(connection, expected);
    http::request_parser<http::string_body> parser(std::move(head));
    parser.body_limit(options_.max_body_bytes);
    if (expects_continue(parser.get())) {
      stream.expires_after(options_.header_timeout);
      std::tie(ec, std::ignore) = co_await asio::async_write(stream, asio::buffer(kContinue), kTuple);
    }
    if (!ec && !parser.is_done()) {
      const ReadLimit limit(shared, options_.body_timeout);
      std::tie(ec, std::ignore) = co_await http::async_read(stream, connection.buffer(), parser, kTuple);
      late = ec && limit.passed();
    }
    if (!connection.waits_since) co_return ReadOutcome{};
    connection.waits_since.reset();
    if (late) co_return refused(body_is_late());
    stream.expires_never();
    if (ec) co_return failed(ec);
    incoming.request.body = std::move(parser.get().body());
    co_return ReadOutcome{.incoming = std::move(incoming)};
  }

  template <class Body>
  static void fill_head(http::response<Body>& message, const Response& response, bool http_1_0) {
    message.version(http_1_0 ? 10 : 11);
    message.result(static_cast<unsigned>(response.status));
    message.set(http::field::server, "ditfleet");
    if (!response.content_type.empty()) message.set(http::field::content_type, response.content_type);
    for (const auto& [name, value] : response.headers) message.set(name, value);
  }

  asio::awaitable<bool> write_response(Connection& connection, Response& response, bool head, bool keep,
                                       bool http_1_0) {
    const bool refused =
        !head && response.body.size() > kSmallAnswer && !connections_.make_room_for(response.body.capacity());
    if (refused) {
      response = handlers_.refuse(503, "too many responses are buffered for slow clients; try again shortly",
                                  "too_many_unread_answers");
      keep = false;
    }
    const bool bodiless = head || response.status == 204 || response.status == 304;
    const std::size_t length = response.stream_bytes.value_or(response.body.size());
    const auto counted = connections_.count_unread(connection, bodiless ? 0 : response.body.capacity());
    http::response<http::string_body> message;
    fill_head(message, response, http_1_0);
    message.keep_alive(keep);
    if (!bodiless) message.body() = std::move(response.body);
    if (response.status != 204 && response.status != 304) message.content_length(length);
    http::response_serializer<http::string_body> serializer(message);
    Stream& stream = connection.stream();
    stream.expires_after(options_.write_timeout + std::chrono::seconds(length >> 16));
    error_code ec;
    if (bodiless) {
      std::tie(ec, std::ignore) = co_await http::async_write_header(stream, serializer, kTuple);
    } else {
      std::tie(ec, std::ignore) = co_await http::async_write(stream, serializer, kTuple);
    }
    stream.expires_never();
    co_return !ec && !refused;
  }

  asio::awaitable<void> write_stream(std::shared_ptr<Connection> connection, Response& response, bool http_1_0) {
    http::response<http::empty_body> message;
    fill_head(message, response, http_1_0);
    message.keep_alive(false);
    const bool chunked = !http_1_0 && !response.stream_bytes;
    if (response.stream_bytes) message.content_length(*response.stream_bytes);
    if (chunked) message.chunked(true);
    connection->set_chunked(chunked);
    http::response_serializer<http::empty_body> serializer(message);
    Stream& stream = connection->stream();
    stream.expires_after(options_.write_timeout);
    auto [ec, written] = co_await http::async_write_header(stream, serializer, kTuple);
    stream.expires_never();
    if (ec) co_return;
    connection->watch(connection, response.filler);
    co_await response.stream(*connection);
    connection->unwatch();
    if (connection->gone() || !chunked) co_return;
    stream.expires_after(options_.write_timeout);
    co_await asio::async_write(stream, http::make_chunk_last(), kTuple);
  }

  asio::awaitable<void> refuse(Connection& connection, Response& response) {
    // Two statements, because GCC 12 miscompiles `if (co_await …) co_await …` as a whole body.
    const bool written = co_await write_response(connection, response, false, false, false);
    if (written) co_await linger(connection);
  }

  // Reads and discards what the client still sends, so that it reads the answer before the connection closes.
  asio::awaitable<void> linger(Connection& connection) {
    Stream& stream = connection.stream();
    connection.waits_since = Deadline::Clock::now();
    error_code ignored;
    if (!stream.tls()) stream.socket().shutdown(tcp::socket::shutdown_send, ignored);
    stream.expires_after(kLingerTime);
    std::size_t taken = 0;
    std::array<char, 8192> rest;
    while (taken < kLingerBytes) {
      auto [ec, n] = co_await stream.async_read_some(asio::buffer(rest), kTuple);
      if (ec) break;
      taken += n;
    }
  }

  asio::any_io_executor executor_;
  ServerOptions options_;
  ServerHandlers handlers_;
  std::unique_ptr<asio::ssl::context> tls_;
  tcp::acceptor acceptor_;
  ConnectionSet connections_;
  TaskGroup tasks_;
  bool stopping_ = false;
};

}  // namespace

std::shared_ptr<Server> make_server(asio::any_io_executor executor, ServerOptions options, ServerHandlers handlers) {
  return std::make_shared<HttpServer>(std::move(executor), options, std::move(handlers));
}

}  // namespace ditfleet::gateway
