// How long a unit will run, and what a cold class costs, in GPU-microseconds: a prior from the shape (pixels,
// steps, guidance), corrected by the runs that were observed.
//
// Pure and not thread safe. Classes and workers are dense indices that the scheduler hands out.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "shared/job/shape_class.h"

namespace ditfleet::scheduling {

using ClassId = std::uint32_t;
using ModelId = std::uint32_t;
using WorkerId = std::uint32_t;

// An exponentially weighted mean whose first value counts whole.
class Ewma {
 public:
  void add(double value, double weight) {
    value_ = known_ ? static_cast<float>(value_ + weight * (value - value_)) : static_cast<float>(value);
    known_ = true;
  }
  bool known() const { return known_; }
  double value() const { return value_; }

 private:
  float value_ = 0;
  bool known_ = false;
};

// A transformer of 12 billion parameters on one data-centre GPU. What it gets wrong (by any factor: a tiny model, a
// CPU) the first observed run corrects; what matters before that is how it orders shapes.
std::int64_t prior_run_us(const job::ShapeClass& shape, int steps, bool adapters = false);

class CostModel {
 public:
  // Corrected prediction for a unit whose prior is `prior_us`. Without such a run on this worker: the mean of such
  // runs, else of the class, else of the model, scaled by the worker's speed, as far as these are known.
  std::int64_t run_us(ClassId c, ModelId m, WorkerId w, std::int64_t prior_us) const;
  // The same for many workers in a row: run_us(c, m, w, prior) of each w.
  class Runs {
   public:
    std::int64_t operator()(WorkerId w) const;

   private:
    friend class CostModel;
    const std::vector<Ewma>* own = nullptr;     // ratios of such runs
    const std::vector<Ewma>* speeds = nullptr;  // of the model
    double prior_us = 0, typical = 1;
  };
  Runs runs(ClassId c, ModelId m, std::int64_t prior_us) const;
  // The same without naming a worker: what a tenant is charged in advance and a client is told.
  std::int64_t typical_run_us(ClassId c, ModelId m, std::int64_t prior_us) const;
  // cold_us() of many runs in a row: what was observed, or nothing where it was not.
  std::optional<std::int64_t> observed_cold_us(ModelId m) const;
  // What the first run of a class costs a worker on top. Unobserved: half a run, at most kColdPriorMax: a
  // guess that lets an idle cold worker win over a queue of one.
  std::int64_t cold_us(ModelId m, std::int64_t run_us) const;
  bool observed(ModelId m) const;
  // A run on a warm worker stands behind predictions. Before, there are at best first runs, which take more by any
  // factor.
  bool confirmed(ModelId m) const;

  // A unit ran for `observed_us`; `cold` if it was the worker's first of the class.
  void observe(ClassId c, ModelId m, WorkerId w, std::int64_t prior_us, std::int64_t observed_us, bool cold);
  // What an earlier leader had predicted for a unit of a class nobody has observed yet.
  void seed(ClassId c, ModelId m, std::int64_t prior_us, std::int64_t predicted_us);

  // An index is about to stand for another class or worker.
  void forget_class(ClassId c);
  void forget_worker(WorkerId w);

 private:
  // Runs of one class with one prior, which is to say one number of steps, with adapters or without: their ratio to it
  // is their own.
  struct Variant {
    std::int64_t prior_us = 0;
    Ewma overall;  // observed ÷ prior
    std::vector<Ewma> by_worker;
  };
  struct ClassCosts {
    Ewma overall;           // observed ÷ prior
    bool observed = false;  // false: overall is at best a seed
    std::vector<Variant> variants;
  };
  struct ModelCosts {
    Ewma overall;
    Ewma cold;                 // microseconds that first runs took beyond the prediction
    std::vector<Ewma> speeds;  // by worker: observed ÷ what is typical of such runs
    bool observed = false, confirmed = false;
  };
  const Variant* variant(ClassId c, std::int64_t prior_us) const;
  double ratio(ClassId c, ModelId m, std::int64_t prior_us) const;

  std::vector<ClassCosts> classes_;
  std::vector<ModelCosts> models_;
};

}  // namespace ditfleet::scheduling
