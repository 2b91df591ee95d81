// The scheduler's shell on a Redis of its own, with null workers.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/scheduling/service/scheduler_service.h"
#include "shared/loras/registry.h"
#include "shared/loras/registry_mirror.h"
#include "tests/fixtures/image_model.h"
#include "tests/system/null_worker.h"
#include "tests/system/queue_fixture.h"

namespace ditfleet::testing {

using scheduling::SchedulerService;

inline constexpr char kTiny[] = R"({"model":"tiny","prompt":"x","seed":1})";

inline job::Catalogue catalogue() {
  job::Catalogue out;
  out.models["tiny"] = job::image_model("tiny", 256, 4);
  out.default_model = "tiny";
  return out;
}

inline queue::QueueOptions short_leases() {
  queue::QueueOptions out;
  out.lease_ms = 1500;
  return out;
}

class SchedulerServiceTest : public QueueTest {
 protected:
  struct Coordinator {
    std::shared_ptr<redis::Connection> connection;
    std::unique_ptr<SchedulerService> service;
  };
  explicit SchedulerServiceTest(RedisServer::Options server = {}, queue::QueueOptions queue = short_leases())
      : QueueTest(server, queue) {}
  ~SchedulerServiceTest() override {
    // Their coroutines end before what they refer to does.
    for (auto& w : workers_) w->vanish();
    for (auto& c : coordinators_) drop(*c);
    io_.restart();
    io_.run_for(20ms);
    workers_.clear();
    coordinators_.clear();
  }

  Coordinator& coordinate(const std::string& name = "c1", std::chrono::milliseconds leader_ttl = 1500ms) {
    return coordinate(name, leader_ttl, server_.endpoint());
  }
  Coordinator& coordinate(const std::string& name, std::chrono::milliseconds leader_ttl, redis::Endpoint endpoint,
                          bool allow_eviction = false) {
    auto& c = *coordinators_.emplace_back(std::make_unique<Coordinator>());
    redis::ConnectionOptions quick;  // so that leases are not held for long after a term has begun
    quick.endpoint = std::move(endpoint);
    quick.connect_timeout = 1000ms;
    quick.backoff_max = 200ms;
    c.connection = redis::Connection::create(io_.get_executor(), std::move(quick));
    c.connection->start();
    scheduling::SchedulerServiceOptions options;
    options.coordinator = name;
    options.leader_ttl_ms = leader_ttl.count();
    options.allow_eviction = allow_eviction;
    options.scheduler.catalogue = catalogue();
    options.scheduler.silent_after_ms = 800;
    options.scheduler.new_nonce = new_nonce;
    options.adapters = std::make_shared<loras::RegistryMirror>(std::make_shared<loras::Registry>(c.connection));
    c.service = std::make_unique<SchedulerService>(io_.get_executor(), c.connection,
                                                   std::make_shared<queue::Client>(c.connection, options_), options);
    c.service->start();
    return c;
  }
  // As a SIGKILL: nothing is said, nothing resigned.
  static void drop(Coordinator& c) {
    c.service.reset();
    if (c.connection) c.connection->stop();
    c.connection.reset();
  }
  NullWorker& worker(NullWorker::Options options = {}) {
    return *workers_.emplace_back(std::make_unique<NullWorker>(io_, server_.endpoint(), std::move(options)));
  }
  // Limits only end a test that hangs: what is waited for takes a hundredth of them on an idle machine.
  template <class F>
  bool until(F condition, std::chrono::milliseconds limit = 60s) {
    const auto deadline = Deadline::after(limit);
    while (!condition()) {
      if (deadline.passed()) return false;
      wait(nap());
    }
    return true;
  }
  asio::awaitable<bool> nap(std::chrono::milliseconds time = 2ms) {
    asio::steady_timer timer(io_, time);
    co_await timer.async_wait(asio::use_awaitable);
    co_return true;
  }
  std::string submit_tiny(const std::string& spec = kTiny, const std::string& tenant = "default") {
    auto s = submission();
    s.spec = spec;
    s.tenant = tenant;
    return submit(s);
  }
  bool registered(std::size_t count) {
    auto workers = wait(client_->workers(soon()));
    return workers && workers->size() == count;
  }
  job::State state_of(const std::string& id) { return job(id).state; }
  bool ended(const std::string& id) { return job::is_terminal(state_of(id)); }
  // Ends of the job as a whole in its own history.
  int ends(const std::string& id) {
    auto events = wait(client_->events(id, "0", 1000, soon()));
    return static_cast<int>(std::count_if(events->begin(), events->end(), [](const queue::Event& e) {
      const auto state = job::state_from_name(e.type);
      return e.unit < 0 && state && job::is_terminal(*state);
    }));
  }

  std::vector<std::unique_ptr<Coordinator>> coordinators_;
  std::vector<std::unique_ptr<NullWorker>> workers_;
};

}  // namespace ditfleet::testing
