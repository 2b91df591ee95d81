// Sends the events of jobs to their webhooks: at least once, each with one id. Every coordinator has a deliverer; that
// of the leader sends.
//
// The queue's Functions write what happened into the outbox in the same step as the change itself. An entry leaves the
// outbox when its receiver has accepted the event, or when the delivery was stored for a retry. A receiver that fails
// three times in a row rests, and its events are stored meanwhile, so that it delays no other one.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>

#include "coordinator/gateway/webhooks/delivery_store.h"
#include "shared/config/settings.h"
#include "shared/core/http_client.h"
#include "shared/core/task_group.h"
#include "shared/queue/types.h"

namespace ditfleet::gateway {

// Not thread-safe: use it on the connection's executor. The settings must outlive it.
class Deliverer {
 public:
  struct Source {
    std::function<bool()> leads;
    std::function<asio::awaitable<Result<queue::JobRecord>>(std::string id)> job;
    std::function<asio::awaitable<json::object>(const queue::JobRecord& record)> describe;  // as GET /v1/jobs/{id}
  };
  Deliverer(asio::any_io_executor executor, std::shared_ptr<redis::Connection> redis, int shard,
            const config::Settings& settings, Source source);
  ~Deliverer();

  asio::awaitable<void> run();   // until it is canceled
  asio::awaitable<void> stop();  // ends the requests that run

 private:
  struct Waiting {
    Delivery delivery;
    std::string entry;  // of the outbox; empty: it is stored
    bool keeps = true;  // false: progress, which is tried once
  };
  struct Endpoint {
    std::multimap<std::int64_t, std::shared_ptr<Waiting>> waiting;  // by due_ms
    int running = 0, failures = 0;                                  // failures in a row
    std::int64_t rests_until_ms = 0;
  };

  asio::awaitable<bool> turn();  // true: there is more to read
  asio::awaitable<bool> load();
  asio::awaitable<bool> read_outbox();
  asio::awaitable<bool> take(DeliveryStore::Change change);
  asio::awaitable<void> report_progress();
  asio::awaitable<bool> store(Waiting& waiting);
  std::shared_ptr<Endpoint> endpoint_of(const Delivery& delivery);
  void add(std::shared_ptr<Waiting> waiting);
  void start_due(const std::shared_ptr<Endpoint>& endpoint);
  asio::awaitable<void> send(std::shared_ptr<Endpoint> endpoint, std::shared_ptr<Waiting> waiting);
  asio::awaitable<HttpClient::Answer> attempt(const Delivery& delivery, std::vector<std::string> secrets);
  asio::awaitable<void> conclude(std::shared_ptr<Endpoint> endpoint, std::shared_ptr<Waiting> waiting,
                                 HttpClient::Answer answer);
  std::int64_t pause_ms(int failures);
  void forget_all();  // what is in memory; Redis has it

  asio::any_io_executor executor_;
  std::shared_ptr<redis::Connection> redis_;
  DeliveryStore store_;
  const config::Settings& settings_;
  Source source_;
  HttpClient client_;
  TaskGroup tasks_;
  std::map<std::string, std::shared_ptr<Endpoint>> endpoints_;  // by tenant and URL
  std::map<std::string, double> progress_;                      // that was reported, by job
  std::string cursor_ = "0-0";
  bool loaded_ = false;
  std::uint64_t generation_ = 0;
  int running_ = 0;
  std::map<std::string, int> running_of_;  // by tenant
  std::size_t waiting_ = 0;                // in memory, of all receivers
  std::int64_t progress_due_ms_ = 0;
  std::minstd_rand random_;
};

}  // namespace ditfleet::gateway
