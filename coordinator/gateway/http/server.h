// HTTP/1.1 on TCP: connections, limits and time-outs. It knows nothing of what is served.
//
// Threads: everything from `executor`, single threaded or a strand.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "coordinator/gateway/http/http.h"
#include "shared/core/deadline.h"
#include "shared/core/result.h"

namespace ditfleet::gateway {

struct ServerOptions {
  std::uint64_t max_body_bytes = 1 << 20;
  std::uint32_t max_header_bytes = 16 << 10;
  std::uint64_t max_unread_bytes = 1u << 30;         // of answers that clients have not read yet, in all
  int max_connections = 1024;                        // one more is answered 503 and closed
  std::chrono::milliseconds idle_timeout{75'000};    // between requests on one connection
  std::chrono::milliseconds header_timeout{10'000};  // from the first byte to the end of the headers
  std::chrono::milliseconds body_timeout{30'000};    // of the whole body
  std::chrono::milliseconds piece_timeout{30'000};   // of each piece of a body that the handler reads itself
  std::chrono::milliseconds write_timeout{30'000};   // of one write, and 1 s more for each 64 KiB
};

struct ServerHandlers {
  std::function<asio::awaitable<Response>(Request)> request;
  // The answer to what is not a request: broken HTTP, too much of it, too many connections.
  std::function<Response(int status, const std::string& message, const std::string& code)> refuse;
  // Whether the handler of this request, of which all but the body is there, reads the body itself (Request::stream),
  // of whatever size. May be empty: never. If it answers before the end, the connection closes.
  std::function<bool(const Request& head)> streams = {};
  std::function<void(int change)> count_connections = {};  // may be empty
};

class Server {
 public:
  Server(asio::any_io_executor executor, ServerOptions options, ServerHandlers handlers);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // `address` is HOST:PORT, [IPv6]:PORT or :PORT; a host name is looked up, which blocks.
  // kInvalidArgument, kUnavailable (in use, not allowed, unknown host).
  Result<void> listen(const std::string& address);
  int port() const;
  std::string local_host() const;  // how a client on this machine names it: "127.0.0.1", "[::1]"

  asio::awaitable<void> run();
  // No more connections, idle ones close; the others until the deadline.
  asio::awaitable<void> stop(Deadline deadline);

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;  // shared with the coroutines of its connections
};

}  // namespace ditfleet::gateway
