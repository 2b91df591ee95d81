// The worker service: takes units from its mailbox in Redis and draws them, until it is told to drain.
//
// Threads: one io thread (whoever runs the io_context), and one each named "device", "text" and "encode".
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shared/core/named_thread.h"
#include "shared/core/task_group.h"
#include "shared/queue/client.h"
#include "shared/redis/connection.h"
#include "shared/results/store.h"
#include "worker/adapters/loader.h"
#include "worker/model_set.h"
#include "worker/units/holdings.h"
#include "worker/units/unit_runner.h"

namespace ditfleet::worker {

struct ServiceOptions {
  std::string name;  // must be unique among living workers
  std::string version;
  int capacity = 2;  // units held at once, the running one included
  Timing timing;
  std::chrono::milliseconds heartbeat{1000};
  std::chrono::milliseconds drain{30'000};
  bool warmup = true;
  // What it will have once it is loaded: told from the first heartbeat on, for jobs are judged while models load.
  std::vector<std::string> models;
  int adapter_slots = 0;
};

struct ServiceParts {
  std::shared_ptr<redis::Connection> connection;  // started by run()
  std::shared_ptr<queue::Client> queue;
  std::shared_ptr<results::Store> store;
  std::function<Result<ModelSet>()> load;  // called once, on the device thread
  AdapterOptions adapters;                 // without a source: no units with adapters
  ImageEncoder encode_image;               // called on the encode thread and, for the warm-up, the device thread
};

class Service {
 public:
  Service(asio::io_context& io, ServiceOptions options, ServiceParts parts);
  ~Service();  // waits for what the threads have in hand
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // Serves until drained (0) or until it cannot go on: a model that does not load, a device that failed
  // (1). Redis may be away at any time, also at the start.
  asio::awaitable<int> run();

  // Io thread. drain(): hand back what has not started, finish what runs within the drain time, end.
  // quit(): hand back everything and end at once.
  void drain();
  void quit();

  // After run(): a thread still works on something that cannot be interrupted; the process had better end
  // without waiting for it.
  bool busy() const { return loading_ || !runner_.idle(); }
  bool ready() const { return state_ == "ready"; }
  const std::string& owner() const { return owner_; }

 private:
  asio::awaitable<void> load_models();
  asio::awaitable<void> heartbeats();
  asio::awaitable<void> mailbox();
  asio::awaitable<void> renewals();
  asio::awaitable<void> say_goodbye();
  asio::awaitable<Result<std::string>> beat();
  void act();   // performs what the holdings decide
  void pump();  // the same, and wakes those that wait for a change
  void beat_soon();
  void tell_adapters();  // with a heartbeat, if they are others than the last one told
  void receive(queue::MailboxEntry entry);
  bool finished() const;

  asio::io_context& io_;
  ServiceOptions options_;
  ServiceParts parts_;
  std::string boot_, owner_, state_ = "starting";
  std::int64_t started_ms_ = 0;
  Holdings holdings_;
  ModelSet models_;
  TaskGroup tasks_;
  std::vector<queue::UnitRef> told_units_;                                       // by the last heartbeat
  std::pair<std::vector<std::string>, std::vector<std::string>> told_adapters_;  // in slots, in host memory; sorted
  asio::steady_timer wake_, renew_timer_, heartbeat_timer_;
  NamedThread device_{"device"}, text_{"text"}, encode_{"encode"};
  AdapterLoader adapters_;
  UnitRunner runner_;
  bool loading_ = false, quitting_ = false, beat_again_ = false;
  std::optional<Error> fatal_;
  std::optional<Clock::time_point> drain_until_;
};

}  // namespace ditfleet::worker
