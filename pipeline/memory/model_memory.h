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

  // False: nothing limits the weights, so needs are not measured and all weights stay. True for GPUs.
  bool limited() const;
  // How a model with these needs would run if it were loaded now, and all other models made room for it.
  PlanReport plan(const MemoryNeeds& needs) const;
  // Whether the weights of a model with these needs fit beside those of the models that are loaded. If not, those
  // leave, and the new ones are to be loaded into host memory.
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

  // Throws Failure (kOutOfMemory) as place() would, if no plan fits. For use before any work is done for the request,
  // on any thread.
  void check(const RequestSize& size) const;
  // Brings weights to the device for the steps of a request, as the fastest plan that fits says. If they are too many,
  // those of other models leave, the least used first. Throws Failure (kOutOfMemory): no plan fits; the message
  // contains the bytes. Call it on the thread that denoises. Other stages of any model may run meanwhile.
  void place(const RequestSize& size);
  // Runs a stage of a request. If it runs out of memory, chooses a plan that needs less and runs it again. Throws what
  // place() and `stage` throw.
  template <class Stage>
  auto run(const RequestSize& size, const Stage& stage) {
    return repeat(stage, [&](const std::string& problem) { step_down(size, problem); });
  }
  // The same for the encoding of a request, on another thread than place(): if it runs out of memory, the model's text
  // encoders and modulation leave, and it runs once more.
  template <class Stage>
  auto run_encode(const RequestSize& size, const Stage& stage) {
    return repeat(stage, [&, left = false](const std::string& problem) mutable {
      if (std::exchange(left, true)) fail_without_plan(size, problem);
      free_encoders(size, problem);
    });
  }
  // Runs the steps of a request, as run(). Before, place(). `steps` is called with what it has to call after each step.
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
  // The next steps use the blocks of this transformer. Unless the plan keeps those of all transformers, these come to
  // the device for those that are there; a pass waits for them block by block. For use within run_steps().
  void use_blocks(std::size_t transformer);
  // Before decode(): blocks leave if the plan says so.
  void make_room_to_decode(const RequestSize& size);
  // The end of a stage. Unless all weights stay, gives memory that LibTorch caches for the stage's streams back to the
  // device: other stages have other streams.
  void trim();
  // The end of a request that place() was called for: compares its peak with the prediction, for the next plans.
  void observe(const RequestSize& size);

  MemoryReport report() const;  // thread-safe, does not block

 private:
  friend class DeviceMemory;
  using Clock = std::chrono::steady_clock;
  struct Cap {
    std::int64_t bytes;
    Clock::time_point until;
  };
  // Whether the time that the blocks compute in a pass decides how many of them stay, and is not known for this size.
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
  // Runs the stage until it does not run out of the device's memory. `make_room` runs in between, and may throw.
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
  std::optional<MemoryPlan> plan_;  // that is applied; empty: the weights are somewhere
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
