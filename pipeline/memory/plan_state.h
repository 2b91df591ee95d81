// The state of one model's memory plan: needs, observations and the applied plan. Decides which plan a request gets and
// which other models leave the device for it. ModelMemory (model_memory.h) moves the weights. No LibTorch, no threads,
// no clock.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/api/model.h"
#include "pipeline/memory/plan.h"

namespace ditfleet::pipeline {

// Not thread-safe.
class PlanState {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // A model of the device, and the bytes of its weights that are on the device now.
  struct Model {
    const PlanState* state;
    std::int64_t kept;
  };
  using Models = std::vector<Model>;  // all models of the device, this one included

  struct Decision {
    PlanChoice choice;                 // no plan: none fits, even if all other models leave
    bool applied = false;              // the plan is the applied one, with its new prediction
    std::vector<std::size_t> leaving;  // indices of the models that leave, the least used first
  };
  using Sample = std::pair<RequestSize, MemoryNeeds>;  // a request, and the model's needs for it

  // `offload`: see MemoryOptions. The samples are for limits(): between and beyond their sizes, bytes grow in
  // proportion to pixels.
  explicit PlanState(std::string offload, const Sample& small = {}, const Sample& large = {})
      : offload_(std::move(offload)), small_(small), large_(large), needs_(large.second) {}

  // --- events
  // The steps of a request begin. `own`: the model's needs for this size.
  void begin(const RequestSize& size, const MemoryNeeds& own, Time now);
  // A step of this size was timed. `hidden`: bytes that can be copied to the device meanwhile.
  void set_hidden(const RequestSize& size, std::int64_t hidden) { sizes_[size].hidden = hidden; }
  void set_plan(const MemoryPlan& plan) { plan_ = plan; }
  // Returns the applied plan and forgets it.
  std::optional<MemoryPlan> take_plan() { return std::exchange(plan_, std::nullopt); }
  // The applied plan ran out of memory, or the resident plan if none is known. Requests of this size avoid plans with
  // as many bytes for a minute. Returns the plan; from now on none is known to be applied.
  MemoryPlan ran_out(const RequestSize& size, Time now);
  void forget_ran_out(const RequestSize& size) { sizes_[size].avoided_until = {}; }
  // A request ended. `observed`: bytes at its peak beside weights. `left`: bytes of blocks that left for decode().
  // Returns the prediction for `observed`. The excess counts for the next requests of this size.
  std::int64_t observe(const RequestSize& size, const MemoryNeeds& own, std::int64_t left, std::int64_t observed);

  // --- answers
  const std::optional<MemoryPlan>& plan() const { return plan_; }  // empty: unknown, after an error
  const MemoryNeeds& needs() const { return needs_; }              // of the last request, or of the large sample
  bool is_timed(const RequestSize& size) const { return of(size).hidden.has_value(); }
  // The number of requests; old requests count less.
  double use_rate(Time now) const;
  // The needs with the excess of this size and with what the other models need at the same time.
  MemoryNeeds needs_beside(const Models& models, const RequestSize& size, MemoryNeeds own) const;
  // The fastest plan if all other models leave. `needs`: see needs_beside().
  PlanChoice choose(const RequestSize& size, const MemoryNeeds& needs, std::int64_t available, Time now) const;
  // A plan about as good as that of choose(), for which as few models as possible leave.
  Decision decide(const RequestSize& size, const MemoryNeeds& needs, const Models& models, std::int64_t available,
                  Time now) const;
  // The available bytes; fewer for a while after ran_out().
  std::int64_t capped(const RequestSize& size, std::int64_t available, Time now) const;
  // The largest requests by plan. Precondition: the samples were given.
  std::vector<MemoryReport::Limit> limits(const Models& models, std::int64_t available) const;

 private:
  // What is known of the requests of one size.
  struct Known {
    std::optional<std::int64_t> hidden;
    std::int64_t excess = 0;  // observed beyond the prediction
    std::int64_t cap = 0;     // plans with more bytes ran out of memory; they are avoided for a while
    Time avoided_until{};
  };
  Known of(const RequestSize& size) const;

  std::string offload_;
  Sample small_, large_;
  MemoryNeeds needs_;
  std::optional<MemoryPlan> plan_;
  std::map<RequestSize, Known> sizes_;
  double uses_ = 0;  // as of used_; decays
  Time used_{};
};

}  // namespace ditfleet::pipeline
