#include "tests/sim/generate_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>

#include "coordinator/simulation/random.h"
#include "coordinator/simulation/range.h"

namespace ditfleet::simulation {
namespace {

// Common sizes of up to 1 megapixel, the most popular first.
constexpr std::array<std::pair<int, int>, 12> kShapes = {{{1024, 1024},
                                                          {1216, 832},
                                                          {832, 1216},
                                                          {768, 768},
                                                          {1344, 768},
                                                          {768, 1344},
                                                          {512, 512},
                                                          {1152, 896},
                                                          {896, 1152},
                                                          {768, 512},
                                                          {512, 768},
                                                          {640, 640}}};
constexpr double kBurstCycleUs = 60e6, kBurstPart = 0.2;
constexpr double kLongestUs = 10.0 * 365 * 24 * 3.6e9;  // between the first and the last generated arrival

// Draws an index by Zipf's law.
class Zipf {
 public:
  Zipf(int count, double exponent) {
    double sum = 0;
    for (int i = 1; i <= count; ++i) up_to_.push_back(sum += 1.0 / std::pow(i, exponent));
  }
  int draw(Random& random) const {
    const double at = random.unit() * up_to_.back();
    return static_cast<int>(std::lower_bound(up_to_.begin(), up_to_.end(), at) - up_to_.begin());
  }

 private:
  std::vector<double> up_to_;
};

}  // namespace

Result<Trace> generate_trace(const TraceOptions& o, const CostTable& costs) {
  struct Given {
    const char* name;
    double value;
    Range range;
  };
  std::vector<Given> given = {{"jobs", 1.0 * o.jobs, whole(1, 2'000'000)},
                              {"workers", 1.0 * o.workers, kWorkers},
                              {"adapters", 1.0 * o.adapters, whole(0, 1'000'000)},
                              {"tenants", 1.0 * o.tenants, whole(1, 1000)},
                              {"shapes", 1.0 * o.shapes, whole(1, kShapes.size())},
                              {"zipf", o.zipf, real(0, 10)},
                              {"load", o.load, real(0.001, 1000)},
                              {"burst", o.burst, real(1, 0.99 / kBurstPart)},
                              {"without-adapter", o.without_adapter, real(0, 1)},
                              {"slo_factor", o.slo_factor, real(0, 1e6)},
                              {"slo_slack_ms", 1.0 * static_cast<double>(o.slo_slack_ms), whole(0, 1e6)}};
  for (const int s : o.steps) given.push_back({"steps", 1.0 * s, kSteps});
  if (o.steps.empty()) return invalid_argument("steps is empty; give at least one number");
  for (const auto& [name, value, range] : given) {
    if (!range.has(value)) return range.error(name, fmt::format("{}", value));
  }
  Random random(o.seed);
  const Zipf adapter_law(std::max(1, o.adapters), o.zipf), shape_law(o.shapes, 0.8);
  std::vector<double> tenant_up_to;
  for (int t = 0; t < o.tenants; ++t) tenant_up_to.push_back((t > 0 ? tenant_up_to.back() : 0.0) + std::pow(2.0, -t));
  Trace trace;
  trace.workers = o.workers;
  double work_us = 0;
  for (int i = 0; i < o.jobs; ++i) {
    const auto [width, height] = kShapes[static_cast<std::size_t>(shape_law.draw(random))];
    TraceJob job{.width = width, .height = height, .steps = o.steps[random.below(o.steps.size())]};
    const double who = random.unit() * tenant_up_to.back();
    job.tenant =
        fmt::format("t{}", std::lower_bound(tenant_up_to.begin(), tenant_up_to.end(), who) - tenant_up_to.begin());
    if (o.adapters > 0 && random.unit() >= o.without_adapter)
      job.adapter = fmt::format("a{:03}", adapter_law.draw(random));
    const auto run = costs.run_us(width, height, job.steps, !job.adapter.empty());
    job.slo_us =
        static_cast<std::int64_t>(o.slo_factor * static_cast<double>(run)) / 1000 * 1000 + o.slo_slack_ms * 1000;
    work_us += static_cast<double>(run);
    trace.jobs.push_back(std::move(job));
  }
  const double mean_gap_us = work_us / o.jobs / o.workers / o.load;
  if (mean_gap_us * o.jobs > kLongestUs) {
    return invalid_argument(
        fmt::format("{} jobs at a load of {} on {} workers take {:.3g} years to arrive; it must be at most 10", o.jobs,
                    o.load, o.workers, 10 * mean_gap_us * o.jobs / kLongestUs));
  }
  const double quiet = (1.0 - o.burst * kBurstPart) / (1.0 - kBurstPart);
  double at = 0;
  for (auto& job : trace.jobs) {
    // Arrivals at rate 1, stretched by the current rate.
    double left = -std::log(1.0 - random.unit()) * mean_gap_us;
    while (true) {
      const double phase = std::fmod(at, kBurstCycleUs);
      const bool burst = phase < kBurstCycleUs * kBurstPart;
      const double rate = burst ? o.burst : quiet, until = (burst ? kBurstCycleUs * kBurstPart : kBurstCycleUs) - phase;
      if (left <= until * rate) {
        at += left / rate;
        break;
      }
      left -= until * rate;
      at += until + 1e-3;  // past the rounding error
    }
    job.at_us = static_cast<std::int64_t>(at) / 1000 * 1000;
  }
  std::string steps;
  for (const int s : o.steps) steps += (steps.empty() ? "" : "/") + std::to_string(s);
  trace.about = fmt::format(
      "workers={} jobs={} load={} steps={} adapters={} zipf={} without_adapter={} shapes={} tenants={} burst={} "
      "seed={}",
      o.workers, o.jobs, o.load, steps, o.adapters, o.zipf, o.without_adapter, o.shapes, o.tenants, o.burst, o.seed);
  return trace;
}

}  // namespace ditfleet::simulation
