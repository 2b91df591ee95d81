#include "coordinator/scheduling/placement/cost_model.h"

#include <algorithm>
#include <cmath>

namespace ditfleet::scheduling {
namespace {

constexpr double kWeight = 0.3;      // of a new observation
constexpr double kColdWeight = 0.1;  // of a cold run: the small difference of two large times
constexpr std::int64_t kColdPriorMax = 2'000'000;
constexpr std::size_t kVariantsMost = 16;  // per class
constexpr std::size_t kPointsMost = 16;    // per model

// Keeps the noise of runs of nearly equal sizes out of the slope: (0.03 ÷ 0.5)², the variance of runs by that of
// slopes, both relative to a run.
constexpr double kSlopeRidge = 0.0036;
constexpr double kFitFrom = 0.1;   // smaller differences are noise, and the mean follows the latest runs
constexpr double kPartsApart = 4;  // the ratios of the two parts differ by at most this factor

// A 12-billion-parameter transformer at about 400 Tflop/s: 2 flop a parameter and token, and attention's
// 4 · tokens² · width flop in 57 blocks.
constexpr double kUsPerToken = 60.0;
constexpr double kUsPerTokenSquared = 0.0017;
constexpr double kUsPerPixelVae = 0.06;
constexpr double kUsText = 30'000.0;
constexpr double kUsMost = 0x1p50;       // a stored class may have any size
constexpr double kWithAdapters = 1.036;  // step with an adapter ÷ without (tests/bench/results/lora_gpu.csv)

std::int64_t scaled(std::int64_t prior_us, double ratio) {
  return std::max<std::int64_t>(1, std::llround(static_cast<double>(prior_us) * ratio));
}

// Of the prior of a step.
double attention_share(std::int64_t tokens) {
  const double quadratic = static_cast<double>(tokens) * kUsPerTokenSquared;
  return quadratic / (kUsPerToken + quadratic);
}

}  // namespace

std::int64_t prior_run_us(const job::ShapeClass& shape, std::int64_t tokens, int steps, bool adapters) {
  const auto n = static_cast<double>(tokens);
  const double passes = shape.guidance == job::GuidanceKind::kTrueCfg ? 2.0 : 1.0;
  const double step = (n * kUsPerToken + n * n * kUsPerTokenSquared) * (adapters ? kWithAdapters : 1.0);
  const double run =
      passes * (std::max(1, steps) * step + kUsText) + static_cast<double>(shape.pixels()) * kUsPerPixelVae;
  return std::llround(std::min(run, kUsMost));
}

const CostModel::Variant* CostModel::variant(ClassId c, std::int64_t prior_us) const {
  for (const auto& candidate : peek(classes_, c).variants) {
    if (candidate.prior_us == prior_us) return &candidate;
  }
  return nullptr;
}

double CostModel::ratio(ClassId c, ModelId m, std::int64_t prior_us) const {
  if (const auto* own = variant(c, prior_us)) return own->overall.value();
  const auto& cls = peek(classes_, c);
  return cls.overall.known() ? cls.overall.value() : model_ratio(m, cls.attention);
}

double CostModel::model_ratio(ModelId m, std::optional<double> attention) const {
  const auto& model = peek(models_, m);
  if (!model.overall.known()) return 1.0;
  if (!attention || model.points.empty()) return model.overall.value();
  const Fit& fit = model.fit;
  const double fitted = fit.linear * (1 - *attention) + fit.quadratic * *attention;
  return std::abs(fitted - fit.mean) > kFitFrom * fit.mean ? fitted : model.overall.value();
}

// The prior of a step is the sum of a linear and a quadratic part, so that observed ÷ prior is linear in the share of
// the quadratic part: this is the line through the points by least squares. One point gives one ratio for both parts.
CostModel::Fit CostModel::fit(const std::vector<Point>& points) {
  const auto n = static_cast<double>(points.size());
  double x = 0, y = 0, xx = 0, xy = 0;
  for (const auto& point : points) {
    x += point.attention / n;
    y += point.ratio.value() / n;
  }
  for (const auto& point : points) {
    xx += (point.attention - x) * (point.attention - x);
    xy += (point.attention - x) * (point.ratio.value() - y);
  }
  const double slope = xy / (xx + kSlopeRidge);
  const Fit out{y - slope * x, y - slope * x + slope, y};
  if (out.quadratic > kPartsApart * out.linear) {
    const double linear = y / (1 - x + kPartsApart * x);
    return {linear, kPartsApart * linear, y};
  }
  if (out.linear > kPartsApart * out.quadratic) {
    const double quadratic = y / (kPartsApart * (1 - x) + x);
    return {kPartsApart * quadratic, quadratic, y};
  }
  return out;
}

CostModel::Runs CostModel::runs(ClassId c, ModelId m, std::int64_t prior_us) const {
  Runs out;
  out.prior_us = static_cast<double>(prior_us);
  out.typical = ratio(c, m, prior_us);
  if (const auto* own = variant(c, prior_us)) out.own = &own->by_worker;
  out.speeds = &peek(models_, m).speeds;
  return out;
}

std::int64_t CostModel::Runs::operator()(WorkerId w) const {
  double ratio = typical;
  if (own != nullptr && peek(*own, w).known()) {
    ratio = peek(*own, w).value();
  } else if (speeds != nullptr && peek(*speeds, w).known()) {
    ratio *= peek(*speeds, w).value();
  }
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(prior_us * ratio + 0.5));
}

std::int64_t CostModel::run_us(ClassId c, ModelId m, WorkerId w, std::int64_t prior_us) const {
  return runs(c, m, prior_us)(w);
}

std::int64_t CostModel::typical_run_us(ClassId c, ModelId m, std::int64_t prior_us) const {
  return scaled(prior_us, ratio(c, m, prior_us));
}

std::int64_t CostModel::unseen_run_us(ModelId m, std::int64_t tokens, std::int64_t prior_us) const {
  return scaled(prior_us, model_ratio(m, attention_share(tokens)));
}

std::optional<std::int64_t> CostModel::observed_cold_us(ModelId m) const {
  const auto& cold = peek(models_, m).cold;
  return cold.known() ? std::optional(std::max<std::int64_t>(0, std::llround(cold.value()))) : std::nullopt;
}

std::int64_t CostModel::cold_us(ModelId m, std::int64_t run_us) const {
  const auto observed = observed_cold_us(m);
  return observed ? *observed : std::min(run_us / 2, kColdPriorMax);
}

void CostModel::observe(ClassId c, ModelId m, WorkerId w, std::int64_t prior_us, std::int64_t observed_us, bool cold) {
  if (prior_us <= 0) return;
  observed_us = std::max<std::int64_t>(1, observed_us);
  const double observed_ratio = static_cast<double>(observed_us) / static_cast<double>(prior_us);
  auto& cls = grown(classes_, c);
  auto& model = grown(models_, m);
  if (cold && cls.observed) {
    // Only a prediction based on warm runs separates the cold cost from the run. Negative differences count too;
    // otherwise the errors of predictions would add up to a cost.
    model.cold.add(static_cast<double>(observed_us - run_us(c, m, w, prior_us)), kColdWeight);
    return;
  }
  if (!model.observed || (!cls.skips && !model.ran_all_steps))
    model.overall = {};  // observed runs replace a seed, and runs of all steps those with skipped steps
  model.ran_all_steps |= !cls.skips;
  if (cold) {
    if (!model.overall.known()) model.overall.add(observed_ratio, kWeight);
    model.observed = true;
    return;
  }
  if (!cls.observed) cls.overall = {};
  cls.observed = model.observed = model.confirmed = true;
  cls.overall.add(observed_ratio, kWeight);
  if (!cls.skips || !model.ran_all_steps) model.overall.add(observed_ratio, kWeight);
  if (cls.attention && !cls.skips) {
    auto point = std::find_if(model.points.begin(), model.points.end(),
                              [&](const Point& p) { return p.attention == *cls.attention; });
    if (point == model.points.end()) {
      if (model.points.size() >= kPointsMost) model.points.erase(model.points.begin());
      point = model.points.insert(model.points.end(), {.attention = *cls.attention});
    }
    point->ratio.add(observed_ratio, kWeight);
    model.fit = fit(model.points);
  }
  auto own =
      std::find_if(cls.variants.begin(), cls.variants.end(), [&](const Variant& v) { return v.prior_us == prior_us; });
  if (own == cls.variants.end()) {
    if (cls.variants.size() >= kVariantsMost) cls.variants.erase(cls.variants.begin());
    cls.variants.push_back({.prior_us = prior_us});
    own = cls.variants.end() - 1;
  } else {
    grown(model.speeds, w).add(observed_ratio / own->overall.value(), kWeight);
  }
  own->overall.add(observed_ratio, kWeight);
  grown(own->by_worker, w).add(observed_ratio, kWeight);
}

void CostModel::define_class(ClassId c, std::int64_t tokens, bool skips) {
  auto& cls = grown(classes_, c);
  cls.attention = attention_share(tokens);
  cls.skips = skips;
}

void CostModel::seed(ClassId c, ModelId m, std::int64_t prior_us, std::int64_t predicted_us) {
  if (prior_us <= 0 || predicted_us <= 0) return;
  const double predicted_ratio = static_cast<double>(predicted_us) / static_cast<double>(prior_us);
  auto& cls = grown(classes_, c);
  if (!cls.overall.known()) cls.overall.add(predicted_ratio, kWeight);
  auto& model = grown(models_, m);
  if (!model.overall.known()) model.overall.add(predicted_ratio, kWeight);
}

void CostModel::forget_class(ClassId c) {
  if (c < classes_.size()) classes_[c] = {};
}

void CostModel::forget_worker(WorkerId w) {
  for (auto& cls : classes_) {
    for (auto& own : cls.variants) {
      if (w < own.by_worker.size()) own.by_worker[w] = {};
    }
  }
  for (auto& model : models_) {
    if (w < model.speeds.size()) model.speeds[w] = {};
  }
}

}  // namespace ditfleet::scheduling
