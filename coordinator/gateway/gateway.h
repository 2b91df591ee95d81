// The HTTP side of the coordinator: OpenAI's image route, native jobs, server-sent events, metrics and the
// console page, on one listening socket. README.md lists the routes; openapi.json describes their JSON.
//
// Call every function on `executor`, which must be single-threaded or a strand. No function blocks it, because the
// process may run the scheduler on the same executor.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "shared/config/settings.h"
#include "shared/core/deadline.h"
#include "shared/core/result.h"
#include "shared/job/catalogue.h"
#include "shared/job/spec.h"

namespace ditfleet::queue {
class Client;
struct UnitRef;
}  // namespace ditfleet::queue
namespace ditfleet::loras {
class Registry;
class RegistryMirror;
}  // namespace ditfleet::loras
namespace ditfleet::results {
class Store;
}
namespace ditfleet::redis {
class Connection;
}

namespace ditfleet::gateway {

namespace asio = boost::asio;

// Functions must not block. An unset function is not called.
struct GatewayDependencies {
  config::Settings settings;  // gateway.*, queue.retention_ms, worker.heartbeat_ms, loras.*, keys
  job::Catalogue catalogue;
  std::shared_ptr<queue::Client> queue;  // the owner loads its Function library into Redis
  std::shared_ptr<results::Store> store;
  std::shared_ptr<redis::Connection> redis;  // the queue's; the event feed opens another connection
  std::shared_ptr<loras::Registry> loras;
  std::shared_ptr<loras::RegistryMirror> adapters;  // of the same registry; the owner runs follow()
  // Why GET /readyz answers 503 ("Redis at … is not connected"); empty: 200. Unset: always 200.
  std::function<std::vector<std::string>()> unready = {};
  // What an operator should mend although the service is ready; a part of GET /readyz.
  std::function<std::vector<std::string>()> warnings = {};
  // Advises against a job that is about to be submitted: kResourceExhausted with retry_after if the job's deadline
  // cannot be met, kUnavailable if Redis would not keep the job. `spec` is complete. Unset: every job is accepted.
  std::function<Result<void>(const job::JobSpec& spec, const std::string& tenant)> advise = {};
  // What a unit that has not started waits for, as a phrase; empty if unknown.
  std::function<std::string(const queue::UnitRef&)> waits_for = {};
};

class Gateway {
 public:
  virtual ~Gateway() = default;  // closes every socket; call stop() first for an orderly end

  // Binds settings.gateway.listen (port 0 picks one). Call it once.
  // Errors: kInvalidArgument (not HOST:PORT), kUnavailable (the port is in use or not permitted; the message says
  // which).
  virtual Result<void> listen() = 0;
  virtual const std::set<std::string>& tenants() const = 0;  // that have keys; after listen()
  virtual bool hears() const = 0;                            // it receives the events of the shard
  virtual std::string url() const = 0;                       // "http://127.0.0.1:8780": where a local client reaches it

  // Serves until stop(); spawn it after listen(). Works without Redis: routes that need it answer 503.
  virtual asio::awaitable<void> run() = 0;
  // Stops accepting connections, ends event streams, and answers requests that wait for an image with 503 (their jobs
  // continue). Other running requests can finish until the deadline; then the remaining connections are closed.
  virtual asio::awaitable<void> stop(Deadline deadline) = 0;
};

std::unique_ptr<Gateway> make_gateway(asio::any_io_executor executor, GatewayDependencies dependencies);

}  // namespace ditfleet::gateway
