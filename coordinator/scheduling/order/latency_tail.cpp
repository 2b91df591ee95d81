#include "coordinator/scheduling/order/latency_tail.h"

#include <algorithm>
#include <cmath>

namespace ditfleet::scheduling {
namespace {

constexpr double kWindowUs = 300e6;  // weights fall to 1/e in it
constexpr double kLeastUs = 1e3, kStep = 1.025;
constexpr double kMostWeight = 1e6;  // then all are scaled down

}  // namespace

void LatencyTail::add(std::int64_t latency_us, std::int64_t now_us) {
  if (total_ == 0) since_us_ = now_us;
  double weight = std::exp(static_cast<double>(now_us - since_us_) / kWindowUs);
  if (weight > kMostWeight) {
    for (auto& each : weights_) each /= weight;
    total_ /= weight;
    since_us_ = now_us;
    weight = 1;
  }
  const double steps = std::log(std::max(static_cast<double>(latency_us), kLeastUs) / kLeastUs) / std::log(kStep);
  weights_[std::min(weights_.size() - 1, static_cast<std::size_t>(steps))] += weight;
  total_ += weight;
}

std::int64_t LatencyTail::exceeded_by_us(double part) const {
  if (total_ == 0) return 0;
  double above = 0;
  std::size_t i = weights_.size();
  while (i > 0 && above + weights_[i - 1] <= part * total_) above += weights_[--i];
  return static_cast<std::int64_t>(kLeastUs * std::pow(kStep, static_cast<double>(i)));
}

}  // namespace ditfleet::scheduling
