// Decides which weights of an engine's models are on the device, and moves them.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/api/model.h"
#include "pipeline/device/failure.h"
#include "pipeline/memory/part_sequence.h"
#include "pipeline/memory/plan.h"

namespace ditfleet::pipeline {

class ModelMemory;

// The memory of one device, shared by the models of an engine. Thread-safe.
class DeviceMemory {
 public:
  DeviceMemory(c10::Device device, MemoryOptions options);

  // Whether memory is limited. If not, needs are not measured and all weights stay on the device. True for GPUs.
  bool limited() const;
  // How a model with these needs would run if it were loaded now and all other models moved to the host.
  PlanReport plan(const MemoryNeeds& needs) const;
  // Whether all weights of another model fit beside those of the loaded models. If not, moves the loaded models to the
  // host; the caller loads the new weights into host memory.
  bool fits_beside(const MemoryNeeds& needs);

 private:
  friend class ModelMemory;
  std::int64_t available() const;
  MemoryNeeds beside_others(const ModelMemory* model, MemoryNeeds needs) const;

  const c10::Device device_;
  const MemoryOptions options_;
  mutable std::mutex mutex_;  // held while weights are moved
  std::vector<ModelMemory*> models_;
  // Whose steps began last. The peak since then is theirs, not that of another request that is decoded meanwhile.
  std::pair<const ModelMemory*, RequestSize> peak_of_;
};

class ModelMemory {
 public:
  // The weights that can leave the device; not null.
  struct Parts {
    std::vector<PartSequence*> text;
    PartSequence* modulation;
    std::vector<PartSequence*> blocks;  // of each transformer; a step uses those of one of them
  };
  struct Source {
    Parts parts;
    std::function<MemoryNeeds(const RequestSize&)> needs;  // thread-safe; may be slow for a new size
    std::function<std::int64_t()> unallocated;  // bytes of needs.fixed that are not allocated yet; thread-safe
    // Between and beyond these sizes, the bytes grow in proportion to RequestSize::pixels().
    RequestSize small, large;
    bool ranks = false;  // several processes share the steps, so one that runs out of memory cannot run them again
  };
  ModelMemory(std::shared_ptr<DeviceMemory> device, std::string name, Source source);
  ~ModelMemory();
  ModelMemory(const ModelMemory&) = delete;
  ModelMemory& operator=(const ModelMemory&) = delete;

  // Throws what place() would throw for this size. Call it before other work for the request, on any thread.
  void check(const RequestSize& size) const;
  // Applies the fastest plan that fits for the steps of a request. Moves other models to the host if it must, the least
  // used first. Throws Failure (kOutOfMemory) if no plan fits; the message contains the bytes. Call it on the denoising
  // thread; other stages of any model may run at the same time.
  void place(const RequestSize& size);
  // Runs a stage of a request, and again with the next smaller plan each time it runs out of memory. Throws what
  // place() and `stage` throw.
  template <class Stage>
  auto run(const RequestSize& size, const Stage& stage) {
    return repeat(stage, [&](const std::string& problem) { step_down(size, problem); });
  }
  // The same for encoding, on another thread than place(): after it runs out of memory, moves the text encoders and the
  // modulation to the host and runs it once more.
  template <class Stage>
  auto run_encode(const RequestSize& size, const Stage& stage) {
    return repeat(stage, [&, left = false](const std::string& problem) mutable {
      if (std::exchange(left, true)) fail_without_plan(size, problem);
      free_encoders(size, problem);
    });
  }
  // Calls place(), then runs the steps of a request as run() does. `steps` gets the callback to call after each step.
  template <class Steps>
  auto run_steps(const RequestSize& size, const StepCallback& on_step, const Steps& steps) {
    start_steps(size);
    const auto all = [&](const StepCallback& callback) {
      const auto once = [&] {
        use_blocks(0);
        return steps(callback);
      };
      auto done = source_.ranks ? once() : run(size, once);
      trim();
      return done;
    };
    if (!wants_step_time(size)) return all(on_step);
    // The first step sets things up, so the second one is measured. From the third one on the plan is the right one.
    return all([&](const StepProgress& progress) {
      if (progress.step == 1) blocks().measure();
      if (progress.step == 2) {
        set_step_time(size, blocks().measured_s());
        place(size);
      }
      return !on_step || on_step(progress);
    });
  }
  // The next steps use this transformer. Unless the plan keeps all transformers, swaps its blocks in for those of the
  // resident transformer; each pass waits for one block at a time. Call it within run_steps().
  void use_blocks(std::size_t transformer);
  // Moves blocks to the host before decode(), if the plan says so.
  void make_room_to_decode(const RequestSize& size);
  // Call it at the end of a stage. Unless all weights stay, returns memory that LibTorch caches for the stage's stream
  // to the device, because other stages have other streams.
  void trim();
  // Call it at the end of a request. Compares its peak with the prediction, for the next plans of this size.
  void observe(const RequestSize& size);

  MemoryReport report() const;  // thread-safe, does not block

 private:
  friend class DeviceMemory;
  using Clock = std::chrono::steady_clock;
  struct Cap {
    std::int64_t bytes;
    Clock::time_point until;
  };
  // True if the plan depends on the step time and this size has not been timed.
  bool wants_step_time(const RequestSize& size) const;
  void set_step_time(const RequestSize& size, double seconds);
  void start_steps(const RequestSize& size);
  PartSequence& blocks() const { return *source_.parts.blocks[used_blocks_]; }
  std::int64_t kept_blocks() const;  // bytes, of all transformers
  void keep_blocks(std::int64_t of_used, bool others, bool wait = true);
  std::int64_t kept() const;
  void add_excess(const RequestSize& size, MemoryNeeds& needs) const;
  void start_peak(const RequestSize& size);  // from now on the peak is this request's
  double use_rate(Clock::time_point now) const;
  void leave();
  void apply(const MemoryPlan& plan);
  PlanChoice choose(const RequestSize& size, const MemoryNeeds& needs, std::int64_t available) const;
  // The message of the exception in flight if it says that the device's memory does not suffice; else empty.
  static std::string memory_problem();
  void step_down(const RequestSize& size, const std::string& problem);
  void free_encoders(const RequestSize& size, const std::string& problem);
  [[noreturn]] void fail_without_plan(const RequestSize& size, const std::string& problem) const;
  // Runs the stage until it does not run out of the device's memory, with `make_room` in between, which may throw.
  template <class Stage, class MakeRoom>
  static auto repeat(const Stage& stage, MakeRoom make_room) {
    for (;;) {
      std::string problem;
      try {
        return stage();
      } catch (const Failure&) {
        throw;
      } catch (const std::bad_alloc&) {  // of the host
        throw;
      } catch (...) {
        problem = memory_problem();
        if (problem.empty()) throw;
      }
      make_room(problem);
    }
  }
  std::int64_t capped(const RequestSize& size, std::int64_t available) const;
  void update_report();

  const std::shared_ptr<DeviceMemory> device_;
  const std::string name_;
  const Source source_;
  MemoryNeeds needs_;               // of the last request
  std::optional<MemoryPlan> plan_;  // applied; empty: unknown, after an error
  std::size_t used_blocks_ = 0;     // of which transformer
  std::int64_t kept_in_steps_ = 0;  // kept() before make_room_to_decode()
  std::map<RequestSize, double> step_s_;
  std::map<RequestSize, std::int64_t> excess_;  // that was observed beyond the prediction
  std::map<RequestSize, Cap> caps_;             // plans with more bytes have run out of memory
  double uses_ = 0;                             // decays
  Clock::time_point used_;
  std::pair<MemoryNeeds, MemoryNeeds> samples_;  // of source_.small and large
  MemoryReport report_;
  mutable std::mutex report_mutex_;
};

}  // namespace ditfleet::pipeline
