// Moves the weights of an engine's models to and from the device, as their plans (plan_state.h) say.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/api/model.h"
#include "pipeline/memory/part_sequence.h"
#include "pipeline/memory/plan_state.h"

namespace ditfleet::pipeline {

class ModelMemory;

// The memory of one device, shared by the models of an engine. Thread-safe.
class DeviceMemory {
 public:
  DeviceMemory(c10::Device device, MemoryOptions options);

  // Whether memory is limited, as on every GPU. If not, all weights stay on the device, and needs are not measured.
  // Thread-safe.
  bool limited() const;
  // How a model with these needs would run if it were loaded now and all other models moved to the host.
  PlanReport plan(const MemoryNeeds& needs) const;
  // Whether all weights of another model fit beside those of the loaded models. If not, moves the loaded models to the
  // host; the caller loads the new weights into host memory.
  bool fits_beside(const MemoryNeeds& needs);

 private:
  friend class ModelMemory;
  bool plans() const { return limited() && options_.offload != "none"; }
  std::int64_t available() const;
  PlanState::Models models() const;

  const c10::Device device_;
  const MemoryOptions options_;
  mutable std::mutex mutex_;  // held while weights are moved
  std::vector<ModelMemory*> models_;
  // The request whose steps began last. The peak since then belongs to it, not to a request that is decoded meanwhile.
  std::pair<const ModelMemory*, RequestSize> peak_of_;
};

class ModelMemory {
 public:
  // The weights that can leave the device; not null.
  struct Parts {
    std::vector<PartSequence*> encoders;  // the text encoders, and the modulation
    std::vector<PartSequence*> blocks;    // of each transformer, at least one; a step uses those of one transformer
  };
  struct Source {
    Parts parts;
    std::function<MemoryNeeds(const RequestSize&)> needs;  // thread-safe; may be slow for a new size
    std::function<std::int64_t()> unallocated;  // bytes of needs.fixed that are not allocated yet; thread-safe
    RequestSize small, large;                   // see PlanState::PlanState()
    bool ranks = false;  // several processes share the steps, so a process that runs out of memory cannot repeat them
  };
  ModelMemory(std::shared_ptr<DeviceMemory> device, std::string name, Source source);
  ~ModelMemory();
  ModelMemory(const ModelMemory&) = delete;
  ModelMemory& operator=(const ModelMemory&) = delete;

  // Throws Failure (kOutOfMemory) if no plan fits; the message contains the bytes. Call it before other work for the
  // request, on any thread.
  void check(const RequestSize& size) const;
  // Runs a stage of a request. Each time the stage runs out of memory, applies the next smaller plan and repeats it.
  // Throws what check() and `stage` throw.
  template <class Stage>
  auto run(const RequestSize& size, const Stage& stage) {
    for (;;) {
      try {
        return stage();
      } catch (...) {
        step_down(size, memory_problem());
      }
    }
  }
  // Runs encode(), on another thread than run(). If it runs out of memory, moves the text encoders and the modulation
  // to the host and repeats it once.
  template <class Stage>
  auto run_encode(const RequestSize& size, const Stage& stage) {
    for (bool again = false;; again = true) {
      try {
        return stage();
      } catch (...) {
        free_encoders(size, memory_problem(), again);
      }
    }
  }
  // Applies the fastest plan that fits, then runs the steps of a request as run() does. Moves other models to the host
  // if it must, the least used first. Call it on the denoising thread; other stages of any model may run meanwhile.
  template <class Steps>
  auto run_steps(const RequestSize& size, const Steps& steps) {
    start_steps(size);
    const auto from_first = [&] {
      use_blocks(0);
      return steps();
    };
    auto done = source_.ranks ? from_first() : run(size, from_first);
    trim();
    return done;
  }
  // The next steps use this transformer. Unless the plan keeps all transformers, swaps its blocks in for the blocks of
  // the resident transformer; each pass waits for one block at a time. Call it within run_steps().
  void use_blocks(std::size_t transformer);
  // Call it within run_steps() when `steps` steps are done. May change the plan, because it measures a step.
  void after_step(const RequestSize& size, std::int64_t steps);
  // Moves blocks to the host before decode(), if the plan says so.
  void make_room_to_decode(const RequestSize& size);
  // Returns LibTorch's cached memory of the stage's stream to the device, unless all weights stay: other stages have
  // other streams. Call it at the end of a stage.
  void trim();
  // Compares the peak of a request with the prediction, for the next plans of this size. Call it at the end of a
  // request.
  void observe(const RequestSize& size);

  MemoryReport report() const;  // thread-safe, does not block

 private:
  friend class DeviceMemory;
  void start_steps(const RequestSize& size);
  void place(const RequestSize& size);
  void choose(const RequestSize& size, const MemoryNeeds& own);
  PartSequence& blocks() const { return *source_.parts.blocks[used_blocks_]; }
  void keep_blocks(std::int64_t of_used, bool others, bool wait = true);
  std::int64_t kept() const;
  void leave();
  void apply(const MemoryPlan& plan);
  // The message of the exception in flight if the device's memory does not suffice; else rethrows the exception.
  static std::string memory_problem();
  void step_down(const RequestSize& size, const std::string& problem);
  void free_encoders(const RequestSize& size, const std::string& problem, bool again);
  [[noreturn]] void fail_without_plan(const RequestSize& size, const std::string& problem) const;
  void update_report();

  const std::shared_ptr<DeviceMemory> device_;
  const std::string name_;
  const Source source_;
  PlanState state_{device_->options_.offload};
  std::size_t used_blocks_ = 0;     // of which transformer
  std::int64_t kept_in_steps_ = 0;  // kept() before make_room_to_decode()
  bool times_step_ = false;         // after_step() measures a step of this request
  MemoryReport report_;
  mutable std::mutex report_mutex_;
};

}  // namespace ditfleet::pipeline
