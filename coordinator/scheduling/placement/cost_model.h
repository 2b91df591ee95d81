// Predicts the duration of runs and the cost of a cold class in GPU-microseconds. A prediction is a prior from tokens,
// steps and guidance, corrected by observed runs. A step costs a · tokens + b · tokens²; for a class without observed
// runs, the observed classes of its model correct a and b.
//
// No I/O, no clock; not thread-safe. Classes, models and workers are dense indices that the scheduler assigns.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "coordinator/scheduling/placement/dense.h"
#include "shared/job/shape_class.h"

namespace ditfleet::scheduling {

using ClassId = std::uint32_t;
using ModelId = std::uint32_t;
using WorkerId = std::uint32_t;

// An exponentially weighted mean; the first value has full weight.
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

// The duration of a run of a 12-billion-parameter transformer on one data-center GPU. For other models and devices it
// may be wrong by any factor; the first observed run corrects it. Before that only the order of shapes matters.
// `tokens`: of a forward pass, including text.
std::int64_t prior_run_us(const job::ShapeClass& shape, std::int64_t tokens, int steps, bool adapters = false);

class CostModel {
 public:
  // The corrected prediction for a unit with this prior. If no such run was observed on the worker, it is based on the
  // mean of such runs on all workers, else of the class, else on the model's other classes, scaled by the worker's
  // speed if known.
  std::int64_t run_us(ClassId c, ModelId m, WorkerId w, std::int64_t prior_us) const;
  // run_us(c, m, w, prior_us) for many workers.
  class Runs {
   public:
    std::int64_t operator()(WorkerId w) const;

   private:
    friend class CostModel;
    const std::vector<Ewma>* own = nullptr;     // ratios, by worker
    const std::vector<Ewma>* speeds = nullptr;  // of the model, by worker
    double prior_us = 0, typical = 1;
  };
  Runs runs(ClassId c, ModelId m, std::int64_t prior_us) const;
  // The prediction for any worker: charged in advance, and shown to clients.
  std::int64_t typical_run_us(ClassId c, ModelId m, std::int64_t prior_us) const;
  // The same for a class that has no index yet.
  std::int64_t unseen_run_us(ModelId m, std::int64_t tokens, std::int64_t prior_us) const;
  // The observed cost of a cold class, if any.
  std::optional<std::int64_t> observed_cold_us(ModelId m) const;
  // The additional time of a worker's first run of a class. Before any was observed, this is half a run but at most 2
  // s, so that an idle cold worker is preferred to a warm worker with one unit.
  std::int64_t cold_us(ModelId m, std::int64_t run_us) const;
  bool observed(ModelId m) const { return peek(models_, m).observed; }
  // True once a run on a warm worker was observed. Cold runs take longer by any factor.
  bool confirmed(ModelId m) const { return peek(models_, m).confirmed; }

  // A unit ran for `observed_us`. cold: it was the worker's first run of the class.
  void observe(ClassId c, ModelId m, WorkerId w, std::int64_t prior_us, std::int64_t observed_us, bool cold);
  // Sets the tokens of a forward pass. A class without them is predicted by the mean of its model's runs. `skips`: its
  // runs skip steps, so they say nothing about other classes.
  void define_class(ClassId c, std::int64_t tokens, bool skips = false);
  // Sets the prediction of an earlier leader. Ignored if a run of the class was observed.
  void seed(ClassId c, ModelId m, std::int64_t prior_us, std::int64_t predicted_us);

  // Call these before the index is reused for another class or worker.
  void forget_class(ClassId c);
  void forget_worker(WorkerId w);

 private:
  // Runs of one class with one prior: one number of steps, with or without adapters.
  struct Variant {
    std::int64_t prior_us = 0;
    Ewma overall;  // observed ÷ prior
    std::vector<Ewma> by_worker;
  };
  struct ClassCosts {
    Ewma overall;           // observed ÷ prior
    bool observed = false;  // false: overall is at best a seed
    bool skips = false;
    std::vector<Variant> variants;
    std::optional<double> attention;  // share of the quadratic part in the prior of a step
  };
  // Warm runs with one number of tokens.
  struct Point {
    double attention = 0;  // as above
    Ewma ratio;            // observed ÷ prior
  };
  // Observed ÷ prior of the two parts of a step.
  struct Fit {
    double linear = 1, quadratic = 1, mean = 1;  // mean: of the points
  };
  static Fit fit(const std::vector<Point>& points);
  struct ModelCosts {
    Ewma overall;
    std::vector<Point> points;
    Fit fit;                   // of points
    Ewma cold;                 // microseconds beyond the prediction
    std::vector<Ewma> speeds;  // by worker: observed ÷ typical
    bool observed = false, confirmed = false;
    bool ran_all_steps = false;  // a run without skipped steps was observed
  };
  const Variant* variant(ClassId c, std::int64_t prior_us) const;
  double ratio(ClassId c, ModelId m, std::int64_t prior_us) const;
  double model_ratio(ModelId m, std::optional<double> attention) const;

  std::vector<ClassCosts> classes_;
  std::vector<ModelCosts> models_;
};

}  // namespace ditfleet::scheduling
