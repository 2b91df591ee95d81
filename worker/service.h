// The worker service: runs the units that arrive in its mailbox in Redis, until it is drained.
//
// The service uses the io thread, which runs the io_context, and the threads "device", "text" and "encode".
#pragma once

#include <array>
#include <atomic>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "shared/core/deadline.h"
#include "shared/core/named_thread.h"
#include "shared/core/task_group.h"
#include "shared/queue/client.h"
#include "shared/redis/connection.h"
#include "shared/results/store.h"
#include "worker/adapters/loader.h"
#include "worker/gpu_meter.h"
#include "worker/models/model_set.h"
#include "worker/units/unit_runner.h"
#include "worker/units/unit_table.h"

namespace ditfleet::worker {

struct ServiceOptions {
  std::string name;  // must be unique among living workers
  std::string version;
  int capacity = 2;                       // most units at a time, including the running one
  std::chrono::milliseconds lease{5000};  // of the queue
  Timing timing;
  std::chrono::milliseconds heartbeat{1000};
  std::chrono::milliseconds drain{30'000};
  std::chrono::milliseconds stuck{60'000};  // see Watchdog
  bool warmup = true;
  // Reported while the models load. The scheduler can then reject jobs that no worker can run from the first heartbeat.
  std::vector<std::string> models;
  int adapter_slots = 0;
  int gpus = 1;  // that share each unit
};

struct ServiceParts {
  std::shared_ptr<redis::Connection> connection;  // started by run()
  std::shared_ptr<queue::Client> queue;
  std::shared_ptr<results::Store> store;
  std::function<Result<ModelSet>()> load;            // called once, on the device thread
  AdapterOptions adapters;                           // without a source, units with adapters are rejected
  std::chrono::milliseconds checkpoint_interval{0};  // worker.checkpoint_ms
  std::int64_t checkpoint_bytes = 256 << 20;         // largest checkpoint of a unit that is stored
  bool carry_receipts = false;     // PNG and MP4 files have the id of their receipt (results.carry_receipts)
  WriterOpener open_writer;        // called on the encode thread, and on the device thread for the warm-up
  std::function<void()> on_ready;  // called once, when units can come; may be empty
};

class Service {
 public:
  Service(asio::io_context& io, ServiceOptions options, ServiceParts parts);
  ~Service();  // waits for the work in progress on the threads
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // Serves until it is drained (returns 0), or until a model cannot be loaded, the device fails or work of a unit hangs
  // (returns 1).
  // Tolerates a Redis that is down at any time, including at the start.
  asio::awaitable<int> run();

  // Call both functions on the io thread. drain() hands back the units that have not started, gives the others the
  // drain time to finish, and ends run(). quit() hands back all units and ends run() immediately. Administrators can
  // also drain a worker through Redis (queue::Desired); its units then have no time limit.
  void drain();
  void quit();
  // The device or a part of it has failed: hands back all units and ends run() with 1. On the io thread.
  void fail(const Error& error);

  // After run(): whether a thread is still busy with work that cannot be interrupted. The process should then exit
  // without waiting for the thread.
  bool busy() const { return device_.busy() || text_.busy() || encode_.busy() || adapters_.busy(); }
  bool ready() const { return state_ == State::kReady; }
  // Why no unit can come, as of the last heartbeat; empty: units can come. Thread-safe.
  std::string why_not_ready() const { return why_not_ready_.load(); }
  const std::string& owner() const { return owner_; }

 private:
  // kCordoned: drained by an administrator until resumed. kDraining: ends when it is empty. kStopping: hands back all.
  enum class State { kStarting, kReady, kCordoned, kDraining, kStopping };
  asio::awaitable<void> load_models();
  asio::awaitable<void> heartbeats();
  asio::awaitable<void> mailbox();
  asio::awaitable<void> renewals();
  asio::awaitable<void> watch_loading();
  asio::awaitable<void> watch_progress();
  asio::awaitable<void> leave();
  asio::awaitable<Result<std::string>> send_heartbeat();
  void begin_drain(Deadline limit);
  void apply_desired();
  void note_readiness(bool registered);
  void perform_actions();
  void update();  // performs actions and wakes the coroutines that wait for a change
  void heartbeat_now();
  std::optional<double> energy_j() const;  // of all GPUs
  void report_residents();                 // in a heartbeat, if they have changed since the last one
  void receive(queue::MailboxEntry entry);
  bool finished() const;

  asio::io_context& io_;
  ServiceOptions options_;
  ServiceParts parts_;
  std::string boot_, owner_;
  State state_ = State::kStarting;
  queue::Desired desired_ = queue::Desired::kReady;  // when it was last read
  std::int64_t started_ms_ = 0;
  UnitTable table_;
  Watchdog watchdog_;
  std::vector<std::shared_ptr<const GpuMeter>> meters_;  // of the GPUs that measure
  ModelSet models_;
  TaskGroup tasks_;
  std::vector<queue::UnitRef> reported_units_;               // in the last heartbeat
  std::array<std::set<std::string>, 3> reported_residents_;  // adapters in slots, in host memory, absent models
  asio::steady_timer wake_, renew_timer_, heartbeat_timer_;
  NamedThread device_{"device"}, text_{"text"}, encode_{"encode"};
  AdapterLoader adapters_;
  UnitRunner runner_;
  bool loading_ = false, quitting_ = false, heartbeat_pending_ = false;
  std::atomic<const char*> why_not_ready_ = "loading the models";
  std::optional<Error> fatal_;
  Deadline drain_until_ = Deadline::never();
};

}  // namespace ditfleet::worker
