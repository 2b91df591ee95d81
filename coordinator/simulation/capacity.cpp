#include "coordinator/simulation/capacity.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "coordinator/simulation/range.h"
#include "coordinator/simulation/simulation.h"
#include "shared/core/text.h"

namespace ditfleet::simulation {
namespace {

constexpr double kLoadStep = 0.01;  // precision of Capacity::load

class Search {
 public:
  Search(const Trace& trace, const CostTable& costs, const std::vector<Objective>& objectives, double speed)
      : trace_(trace), costs_(costs), objectives_(objectives), speed_(speed) {}

  Result<FleetFigures> at(int workers) {
    const auto known = tried_.find(workers);
    if (known != tried_.end()) return known->second;
    auto figures = run(trace_, workers);
    if (figures) tried_[workers] = *figures;
    return figures;
  }

  // Arrivals faster by `load`.
  Result<FleetFigures> at_load(int workers, double load) {
    Trace faster = trace_;
    for (auto& job : faster.jobs) job.at_us = std::llround(static_cast<double>(job.at_us) / load);
    return run(faster, workers);
  }

  // A smaller fleet misses an objective: the jobs that must end in time have more work than it can do until then.
  int least_workers() const {
    std::vector<double> runs;
    for (const auto& job : trace_.jobs) {
      const auto us = job.run_us > 0
                          ? static_cast<double>(job.run_us)
                          : static_cast<double>(costs_.run_us(job.width, job.height, job.steps, !job.adapter.empty())) *
                                (1 - costs_.run_spread);
      runs.push_back(us / 1e6 / speed_);
    }
    std::sort(runs.begin(), runs.end());
    const double span_s = static_cast<double>(trace_.jobs.back().at_us - trace_.jobs.front().at_us) / 1e6;
    double least = 1;
    for (const auto& objective : objectives_) {
      const auto in_time = static_cast<std::size_t>(objective.percent / 100.0 * static_cast<double>(runs.size()));
      double work_s = 0;
      for (std::size_t i = 0; i < in_time; ++i) work_s += runs[i];
      least = std::max(least, std::floor(work_s / (span_s + objective.seconds)));
    }
    return static_cast<int>(std::min(least, kWorkers.most));
  }

 private:
  Result<FleetFigures> run(const Trace& trace, int workers) const {
    const auto report = simulate(trace, costs_, {.workers = workers, .warm_up = 0, .speed = speed_});
    if (!report) return report.error();
    const double span_s = static_cast<double>(trace.jobs.size()) / report->figure("throughput");
    FleetFigures out{.workers = workers,
                     .p50_s = report->figure("latency_p50"),
                     .p95_s = report->figure("latency_p95"),
                     .p99_s = report->figure("latency_p99"),
                     .utilisation = report->figure("utilisation"),
                     .gpu_hours = workers * span_s / 3600};
    out.meets = std::all_of(objectives_.begin(), objectives_.end(), [&](const Objective& objective) {
      const double observed = objective.percent == 50 ? out.p50_s : objective.percent == 95 ? out.p95_s : out.p99_s;
      return observed <= objective.seconds;
    });
    return out;
  }

  const Trace& trace_;
  const CostTable& costs_;
  const std::vector<Objective>& objectives_;
  double speed_;
  std::map<int, FleetFigures> tried_;
};

// The largest load that the fleet bears.
Result<double> most_load(Search& search, int workers) {
  double bears = 1, fails = kMostLoad + kLoadStep;
  while (fails - bears > kLoadStep * 1.5) {
    const double middle = std::round((bears + fails) / 2 / kLoadStep) * kLoadStep;
    const auto figures = search.at_load(workers, middle);
    if (!figures) return figures.error();
    (figures->meets ? bears : fails) = middle;
  }
  return bears;
}

}  // namespace

Result<Objective> parse_objective(const std::string& text) {
  const auto wrong = invalid_argument("the objective is '" + text +
                                      "'; write p50, p95 or p99 and a time in ms, s or m, such as p95=20s");
  const auto equals = text.find('=');
  if (equals == std::string::npos) return wrong;
  static const std::map<std::string, int> kPercents = {{"p50", 50}, {"p95", 95}, {"p99", 99}};
  const auto percent = kPercents.find(text.substr(0, equals));
  std::string_view time = std::string_view(text).substr(equals + 1);
  const auto unit = time.find_first_not_of("0123456789.");
  if (percent == kPercents.end() || unit == std::string_view::npos) return wrong;
  static const std::map<std::string_view, double> kUnits = {{"ms", 1e-3}, {"s", 1}, {"m", 60}};
  const auto scale = kUnits.find(time.substr(unit));
  const auto number = number_of<double>(time.substr(0, unit));
  if (scale == kUnits.end() || !number || !real(1e-3, 1e6).has(*number * scale->second)) return wrong;
  return Objective{percent->second, *number * scale->second};
}

CostTable observed_costs(int lookahead) {
  return {.adapter_bytes = 1,
          .adapter_load_bytes_per_s = 1e15,
          .adapter_slots = 1024,
          .host_adapter_bytes = 1'000'000'000,
          .lookahead = lookahead};
}

Result<Capacity> find_capacity(const Trace& trace, const CostTable& costs, const std::vector<Objective>& objectives,
                               double speed, int max_workers) {
  if (trace.jobs.empty()) return invalid_argument("the trace has no jobs");
  if (objectives.empty()) return invalid_argument("give at least one objective, such as p95=20s");
  if (!kWorkers.has(max_workers)) return kWorkers.error("the number of workers", std::to_string(max_workers));
  Search search(trace, costs, objectives, speed);
  // Doubles the step until a fleet meets the objectives, then bisects.
  int misses = std::min(search.least_workers(), max_workers) - 1, meets = misses + 1;
  for (int step = 1;; step *= 2) {
    const auto figures = search.at(meets);
    if (!figures) return figures.error();
    if (figures->meets) break;
    if (meets == max_workers) {
      Capacity out{.fleet = *figures, .one_fewer = {}};
      return out;
    }
    misses = meets;
    meets = std::min(max_workers, meets + step);
  }
  while (meets - misses > 1) {
    const int middle = misses + (meets - misses) / 2;
    const auto figures = search.at(middle);
    if (!figures) return figures.error();
    (figures->meets ? meets : misses) = middle;
  }
  // A fleet that meets them by chance is too small.
  while (meets < max_workers) {
    const auto next = search.at(meets + 1);
    if (!next) return next.error();
    if (next->meets && search.at(meets)->meets) break;
    ++meets;
  }
  const auto fleet = search.at(meets);
  if (!fleet) return fleet.error();
  Capacity out{.fleet = *fleet, .one_fewer = {}};
  if (meets > 1) {
    const auto fewer = search.at(meets - 1);
    if (!fewer) return fewer.error();
    out.one_fewer = *fewer;
  }
  if (!fleet->meets) return out;
  const auto load = most_load(search, meets);
  if (!load) return load.error();
  out.load = *load;
  return out;
}

}  // namespace ditfleet::simulation
