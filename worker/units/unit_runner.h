// Performs what Holdings decides for the units: text encoding, start, denoising, pixel encoding, storing,
// completing, and the reports of what went wrong. Each is one coroutine on the io thread that hands its
// heavy part to the thread for it.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "shared/core/log_throttle.h"
#include "shared/core/named_thread.h"
#include "shared/core/task_group.h"
#include "shared/queue/client.h"
#include "shared/results/store.h"
#include "worker/adapters/loader.h"
#include "worker/model_set.h"
#include "worker/units/holdings.h"
#include "worker/units/unit.h"

namespace ditfleet::worker {

// Not thread safe: the io thread's. Must outlive the threads it is given work for.
class UnitRunner {
 public:
  struct Parts {
    asio::any_io_executor executor;
    queue::Client& queue;
    results::Store& store;
    Holdings& holdings;
    TaskGroup& tasks;
    NamedThread &text, &device, &encode;
    AdapterLoader& adapters;
    ImageEncoder encode_image;
    std::function<void()> adapters_moved;     // the models may hold others than before
    std::function<void()> changed;            // holdings may have something to decide
    std::function<void(const Error&)> fault;  // the device failed: begin nothing more, the process must end
  };
  explicit UnitRunner(Parts parts);

  // Takes an assigned unit into the holdings, or reports why not.
  void assign(queue::MailboxEntry entry, const ModelSet& models);
  void perform(const Action& action);
  // Tells the device thread the leases as the holdings know them. After each renewal.
  void publish_leases();
  // Nothing is being done for any unit, not even a report.
  bool idle() const { return tasks_running_ == 0; }
  // Shape classes that ran here, latest last, at most 64.
  const std::vector<std::string>& warm_classes() const { return warm_classes_; }
  void set_warm_classes(std::vector<std::string> classes) { warm_classes_ = std::move(classes); }

 private:
  using UnitPtr = std::shared_ptr<Unit>;

  // Counts a coroutine among those that idle() waits for.
  void spawn(const char* what, const UnitPtr& unit, asio::awaitable<void> task);
  asio::awaitable<void> counted(asio::awaitable<void> task);

  asio::awaitable<void> bring_adapters(UnitPtr unit);
  asio::awaitable<void> encode_text(UnitPtr unit);
  asio::awaitable<void> start(UnitPtr unit);
  asio::awaitable<void> denoise(UnitPtr unit);
  asio::awaitable<void> finish(UnitPtr unit, std::shared_ptr<pipeline::Media> image);
  asio::awaitable<void> preview(UnitPtr unit, int index, int step, std::shared_ptr<pipeline::Media> image);
  asio::awaitable<void> hand_back(UnitPtr unit, Stop why);
  asio::awaitable<void> report_canceled(UnitPtr unit);
  asio::awaitable<void> fail(UnitPtr unit, Error error);

  // On the device thread.
  Result<pipeline::Media> draw(const UnitPtr& unit, const telemetry::SpanContext& context);

  asio::awaitable<Result<results::Manifest>> store(UnitPtr unit, std::shared_ptr<std::string> bytes);
  asio::awaitable<void> complete(UnitPtr unit, results::Manifest manifest);
  asio::awaitable<void> discard(UnitPtr unit, results::Manifest manifest);
  // Ends the attempt here without an outcome.
  asio::awaitable<void> let_go(UnitPtr unit);
  asio::awaitable<void> pause(std::chrono::milliseconds time);
  void note_warm(const std::string& class_key);

  Parts parts_;
  std::map<std::string, UnitPtr> units_;  // by nonce
  std::vector<std::string> warm_classes_;
  int tasks_running_ = 0;
  LogThrottle cannot_start_, cannot_store_;  // of any unit: they share the Redis, and the disk
};

}  // namespace ditfleet::worker
