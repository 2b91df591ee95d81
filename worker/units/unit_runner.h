// Performs the actions of the unit table: text encoding, start, denoising, image encoding, storing, completing, and
// reports of failures. Each action is a coroutine on the io thread that runs its heavy part on another thread.
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
#include "worker/models/model_set.h"
#include "worker/units/checkpoints.h"
#include "worker/units/unit.h"
#include "worker/units/unit_table.h"
#include "worker/units/watchdog.h"

namespace ditfleet::worker {

// Call every function on the io thread. Must outlive the work on the other threads.
class UnitRunner {
 public:
  struct Parts {
    asio::any_io_executor executor;
    queue::Client& queue;
    results::Store& store;
    UnitTable& table;
    Watchdog& watchdog;
    TaskGroup& tasks;
    NamedThread &text, &device, &encode;
    AdapterLoader& adapters;
    WriterOpener open_writer;
    std::chrono::milliseconds checkpoint_interval;    // see Checkpoints
    std::int64_t checkpoint_bytes;                    // largest checkpoint that is stored
    bool carry_receipts;                              // see ServiceParts
    std::chrono::milliseconds orphan;                 // see Timing
    std::function<std::optional<double>()> energy_j;  // that the device has used; empty: unknown; thread-safe
    std::function<void()>
        residents_changed;                // other adapters may be loaded, or other models on the device, than before
    std::function<void()> table_changed;  // the table may have new actions
    std::function<void(const Error&)> fault;  // the device failed: the process must end without further work
  };
  explicit UnitRunner(Parts parts);

  // Adds an assigned unit to the table, or reports why not.
  void assign(queue::MailboxEntry entry, const ModelSet& models);
  void perform(const Action& action);
  // Fails the unit that is stuck, if this worker still has it, and reports the fault.
  void fail_stuck(const Watchdog::Stuck& stuck);
  // Whether no work and no report is in progress for any unit.
  bool idle() const { return tasks_running_ == 0; }
  // The shape classes that ran here, most recent last, at most 64.
  const std::vector<std::string>& warm_classes() const { return warm_classes_; }
  void set_warm_classes(std::vector<std::string> classes) { warm_classes_ = std::move(classes); }

 private:
  using UnitPtr = std::shared_ptr<Unit>;
  // How many units may be handed back at a time without a limit.
  static constexpr int kMostHandedBack = 64;

  // idle() is false until the coroutine ends.
  void spawn(const char* what, const UnitPtr& unit, asio::awaitable<void> task);
  asio::awaitable<void> counted(asio::awaitable<void> task);
  // Fails the unit if the stage ends by an exception, so that nothing waits for the stage.
  asio::awaitable<void> stage(const char* what, UnitPtr unit, asio::awaitable<void> task);
  // Runs work of the unit on the thread, under the watchdog.
  template <class T>
  asio::awaitable<Result<T>> run_on(NamedThread& thread, Watchdog::Work kind, UnitPtr unit,
                                    std::function<Result<T>()> work);

  asio::awaitable<void> load_adapters(UnitPtr unit);
  // Reads the unit's image from the store.
  asio::awaitable<Result<std::string>> read_input(UnitPtr unit, std::string sha256, std::string field);
  void forget(const std::string& nonce);  // drops the unit, and the decoded image after its job's last unit
  asio::awaitable<void> encode_text(UnitPtr unit);
  asio::awaitable<void> start(UnitPtr unit);
  asio::awaitable<void> denoise(UnitPtr unit);
  asio::awaitable<void> finish(UnitPtr unit, std::shared_ptr<pipeline::Media> image);
  asio::awaitable<void> preview(UnitPtr unit, int index, int step, std::shared_ptr<pipeline::Media> image);
  asio::awaitable<void> store_checkpoints(UnitPtr unit);
  // Until its checkpoint is stored, or `most` has passed.
  asio::awaitable<void> until_stored(UnitPtr unit, std::chrono::milliseconds most);
  asio::awaitable<void> settle(UnitPtr unit);
  asio::awaitable<void> hand_back(UnitPtr unit, StopReason reason);
  asio::awaitable<void> report_canceled(UnitPtr unit);
  asio::awaitable<void> fail(UnitPtr unit, Error error);

  // Denoises and decodes; runs on the device thread.
  Result<pipeline::Media> generate(const UnitPtr& unit, const telemetry::SpanContext& context);

  asio::awaitable<Result<results::Manifest>> store(UnitPtr unit, std::shared_ptr<std::string> bytes);
  asio::awaitable<void> complete(UnitPtr unit, results::Manifest manifest);
  asio::awaitable<void> discard(UnitPtr unit, results::Manifest manifest);
  // Ends the attempt here without an outcome.
  asio::awaitable<void> drop(UnitPtr unit);
  // Repeats a queue call until it succeeds, fails permanently or `give_up` has passed. Returns the last result. The
  // pause between calls doubles up to `max_pause`.
  template <class Call>
  asio::awaitable<Result<void>> report(Call call, Deadline give_up,
                                       std::chrono::milliseconds max_pause = std::chrono::milliseconds(0));
  asio::awaitable<void> pause(std::chrono::milliseconds time);
  void note_warm(const std::string& class_key);

  Parts parts_;
  Checkpoints checkpoints_;
  std::map<std::string, UnitPtr> units_;  // by nonce
  // The image that was decoded last, for the other units of its job. Only one, because an image may have 100 MB.
  std::string images_job_;
  std::vector<std::shared_ptr<const pipeline::Media>> images_;
  std::shared_ptr<const pipeline::Media> mask_;
  bool first_image_ = false;  // has been completed
  std::vector<std::string> warm_classes_;
  int tasks_running_ = 0, handing_back_ = 0;
  LogThrottle start_log_, store_log_;  // shared by all units, since they share Redis and the disk
};

}  // namespace ditfleet::worker
