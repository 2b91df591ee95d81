// The state of webhooks in Redis: secrets, and deliveries that were not accepted at once.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "shared/core/json.h"
#include "shared/core/result.h"
#include "shared/queue/keys.h"
#include "shared/redis/connection.h"

namespace ditfleet::gateway {

namespace asio = boost::asio;

// One event for one receiver.
struct Delivery {
  std::string id;  // the header webhook-id, the same for each attempt
  std::string tenant, url, type, job;
  int attempts = 0;
  std::int64_t first_ms = 0, due_ms = 0;  // when it happened; when it is tried next
  std::string error;                      // of the latest attempt
  bool dead = false;                      // given up
  std::string body;
};

json::object delivery_json(const Delivery& delivery);  // as the API shows it, without the body

// Not thread-safe: use it on the connection's executor. Errors: those of Connection::execute().
class DeliveryStore {
 public:
  DeliveryStore(std::shared_ptr<redis::Connection> redis, int shard) : redis_(std::move(redis)), keys_(shard) {}

  // The tenant's secret, which the first call makes. Until a day after rotate() also the one before, second.
  asio::awaitable<Result<std::vector<std::string>>> secrets(std::string tenant);
  asio::awaitable<Result<std::string>> rotate(std::string tenant);

  asio::awaitable<Result<void>> put(const Delivery& delivery);
  asio::awaitable<Result<Delivery>> get(std::string id);  // kNotFound
  asio::awaitable<Result<void>> remove(std::string id);
  // Those that wait for a retry and those that are dead, the oldest first. An empty tenant: of all tenants.
  asio::awaitable<Result<std::vector<Delivery>>> list(std::string tenant);
  // Sends a stored delivery again, at once. kNotFound; `tenant` as in list().
  asio::awaitable<Result<Delivery>> replay(std::string id, std::string tenant);

  // The outbox: changes of jobs that have not become deliveries yet, after the entry `after`.
  struct Change {
    std::string entry, job, change;  // functions/journal.lua; change "replay": job is the id of a delivery
  };
  asio::awaitable<Result<std::vector<Change>>> changes(std::string after, int limit);
  asio::awaitable<Result<void>> forget(std::string entry);
  asio::awaitable<Result<std::vector<std::string>>> watched();  // jobs whose progress is wanted

 private:
  std::shared_ptr<redis::Connection> redis_;
  queue::Keys keys_;
};

}  // namespace ditfleet::gateway
