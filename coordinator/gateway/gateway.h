// The HTTP side of the coordinator: OpenAI's image route, native jobs, server-sent events, metrics and the
// console page, on one listening socket (README.md has the routes and their JSON).
//
// Threads: everything from `executor`, which is single threaded or a strand. Nothing blocks it: Redis and the
// result store are awaited, and the process may run the scheduler on the same executor.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <functional>
#include <memory>
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
class Directory;
class Registry;
}  // namespace ditfleet::loras
namespace ditfleet::results {
class Store;
}
namespace ditfleet::redis {
class Connection;
}

namespace ditfleet::gateway {

namespace asio = boost::asio;

// What GET /readyz answers: 200, or 503 with the reasons ("Redis at … is not connected").
struct Readiness {
  bool ready = false;
  std::vector<std::string> reasons;
};

// What the scheduler thinks of a job that is about to be submitted.
struct Advice {
  bool accept = true;
  std::string reason;      // why not: the message of the 429
  std::string param = {};  // the field of the request that makes it so, if one does
  int retry_after_s = 1;   // the Retry-After of the 429
};

struct GatewayDependencies {
  config::Settings settings;  // gateway.*, queue.max_queued, keys
  job::Catalogue catalogue;
  std::shared_ptr<queue::Client> queue;  // its library is loaded by whoever made it
  std::shared_ptr<results::Store> store;
  std::shared_ptr<redis::Connection> redis;               // the queue's; the feed opens another like it
  std::shared_ptr<loras::Registry> loras = {};            // null: /v1/loras answers 503
  std::shared_ptr<loras::Directory> lora_directory = {};  // somebody lets it follow
  std::function<Readiness()> readiness;                   // must not block; unset: ready while Redis is connected
  // Queue bound and deadlines that cannot be met. `spec` is complete. Unset: everything is accepted.
  std::function<Advice(const job::JobSpec& spec, const std::string& tenant)> advise;
  // What a unit that has not started waits for, in words; empty: that is not known here. Unset: it never is.
  std::function<std::string(const queue::UnitRef&)> waits_for = {};
};

class Gateway {
 public:
  Gateway(asio::any_io_executor executor, GatewayDependencies dependencies);
  ~Gateway();  // closes every socket; call stop() first for an orderly end
  Gateway(const Gateway&) = delete;
  Gateway& operator=(const Gateway&) = delete;

  // Binds settings.gateway.listen (port 0 picks one). kInvalidArgument: not HOST:PORT. kUnavailable: the
  // port is in use or not allowed; the message says which.
  Result<void> listen();
  int port() const;         // after listen()
  std::string url() const;  // "http://127.0.0.1:8780": where a local client reaches it

  // Serves until stop(); spawn it after listen(). Works without Redis (503 where Redis is needed).
  asio::awaitable<void> run();
  // Takes no more connections, answers requests that wait for a picture with 503 (their jobs go on), ends
  // event streams, lets running requests finish until the deadline, then closes what is left.
  asio::awaitable<void> stop(Deadline deadline);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ditfleet::gateway
