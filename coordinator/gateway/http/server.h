// HTTP/1.1 on TCP: connections, limits and timeouts. Independent of the routes.
//
// Call every function on `executor`, which must be single-threaded or a strand.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "coordinator/gateway/http/http.h"
#include "shared/core/deadline.h"
#include "shared/core/result.h"

namespace ditfleet::gateway {

struct ServerOptions {
  std::uint64_t max_body_bytes = 1 << 20;  // of a body that the handler does not stream
  std::uint32_t max_header_bytes = 16 << 10;
  std::uint64_t max_unread_bytes = 1u << 30;          // of responses that clients have not read yet, in total
  std::uint64_t max_arriving_bytes = 256u << 20;      // of bodies that are being read, in total; at least four bodies
  int max_connections = 1024;                         // above it, ConnectionSet closes waiting connections
  int max_connections_per_peer = 0;                   // 0: a quarter of max_connections
  std::chrono::milliseconds idle_timeout{75'000};     // between requests on one connection
  std::chrono::milliseconds header_timeout{10'000};   // from the first byte to the end of the headers
  std::chrono::milliseconds body_timeout{30'000};     // for the whole body
  std::chrono::milliseconds piece_timeout{30'000};    // for each piece of a streamed body
  std::chrono::milliseconds slow_grace{30'000};       // how long a streamed body may be behind kSlowestBody
  std::chrono::milliseconds write_timeout{30'000};    // for one write, plus 1 s per 64 KiB
  std::string tls_cert_file = {}, tls_key_file = {};  // PEM; empty: no TLS
};

struct ServerHandlers {
  std::function<asio::awaitable<Response>(Request)> request;
  // Returns the response to an invalid request (broken HTTP, too large) or to a connection above the limit.
  std::function<Response(int status, const std::string& message, const std::string& code)> refuse;
  // The response to a request that its head rules out, before its body is read. Unset: none.
  std::function<std::optional<Response>(const Request& head)> refuse_head = {};
  // Whether the request is served even above the limit of connections. Unset: never.
  std::function<bool(const Request& head)> is_vital = {};
  // Whether the handler of this request reads the body from Request::stream instead of Request::body. Unset: never. The
  // connection is closed if the handler responds before it has read the whole body.
  std::function<bool(const Request& head)> streams = {};
};

class Server {
 public:
  virtual ~Server() = default;

  // `address` is HOST:PORT, [IPv6]:PORT or :PORT. Blocks while it resolves a host name.
  // Errors: kInvalidArgument (malformed; unusable certificate or key), kUnavailable (in use, not permitted, unknown
  // host).
  virtual Result<void> listen(const std::string& address) = 0;
  virtual int port() const = 0;
  virtual std::string local_url() const = 0;  // for clients on this host: "http://127.0.0.1:8780"

  virtual asio::awaitable<void> run() = 0;
  // Stops accepting, closes idle connections, and closes the others at the deadline.
  virtual asio::awaitable<void> stop(Deadline deadline) = 0;
};

// The coroutines of its connections share the server.
std::shared_ptr<Server> make_server(asio::any_io_executor executor, ServerOptions options, ServerHandlers handlers);

}  // namespace ditfleet::gateway
