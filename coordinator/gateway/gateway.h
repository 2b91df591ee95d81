// The HTTP side of the coordinator: OpenAI's image route, native jobs, server-sent events, metrics and the
// console page, on one listening socket. README.md lists the routes; openapi.json describes their JSON.
//
// Call every function on `executor`, which must be single-threaded or a strand. No function blocks it, because the
// process may run the scheduler on the same executor.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <memory>
#include <set>
#include <string>

#include "coordinator/gateway/backend/dependencies.h"
#include "shared/core/deadline.h"
#include "shared/core/result.h"

namespace ditfleet::gateway {

namespace asio = boost::asio;

class Gateway {
 public:
  virtual ~Gateway() = default;  // closes every socket; call stop() first for an orderly end

  // Binds settings.gateway.listen (port 0 picks one). Call it once.
  // Errors: kInvalidArgument (not HOST:PORT), kUnavailable (the port is in use or not permitted; the message says
  // which).
  virtual Result<void> listen() = 0;
  virtual const std::set<std::string>& tenants() const = 0;  // that have keys; after listen()
  // Whether it has read the added API keys, without which it refuses their callers; after listen().
  virtual bool knows_keys() const = 0;
  virtual bool hears() const = 0;       // it receives the events of the shard
  virtual std::string url() const = 0;  // "http://127.0.0.1:8780": where a local client reaches it

  // Serves until stop(); spawn it after listen(). Works without Redis: routes that need it answer 503.
  virtual asio::awaitable<void> run() = 0;
  // Stops accepting connections, ends event streams, and answers requests that wait for an image with 503 (their jobs
  // continue). Other running requests can finish until the deadline; then the remaining connections are closed.
  virtual asio::awaitable<void> stop(Deadline deadline) = 0;
};

std::unique_ptr<Gateway> make_gateway(asio::any_io_executor executor, GatewayDependencies dependencies);

}  // namespace ditfleet::gateway
