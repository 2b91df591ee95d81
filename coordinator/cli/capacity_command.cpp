// `ditfleet capacity`: how many workers meet latency objectives on a trace or on the service's history.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "coordinator/cli/command.h"
#include "coordinator/cli/history.h"
#include "coordinator/cli/terminal.h"
#include "coordinator/simulation/capacity.h"
#include "shared/core/text.h"

namespace ditfleet::cli {
namespace {

struct CapacityFlags {
  Target target;
  std::string trace, costs, from = "-24h";
  std::vector<std::string> objectives, kinds;
  int max_workers = 1000;
};

constexpr std::size_t kFewJobs = 100;
constexpr int kLookahead = 2;  // scheduler.lookahead's default

struct Kind {
  std::string name;
  double speed = 1;
};

Result<std::vector<Kind>> parse_kinds(const std::vector<std::string>& texts) {
  std::vector<Kind> kinds;
  for (const std::string& text : texts) {
    const auto equals = text.find('=');
    const auto speed = equals == std::string::npos
                           ? std::nullopt
                           : number_of<double>(std::string_view(text).substr(equals + 1), 0.01, 100);
    if (!speed || equals == 0) {
      return invalid_argument("--kind is '" + text +
                              "'; write NAME=SPEED, with the speed relative to the observed workers, such as h200=1.4");
    }
    kinds.push_back({text.substr(0, equals), *speed});
  }
  if (kinds.empty()) kinds.push_back({"observed", 1});
  return kinds;
}

json::value fleet_json(const simulation::FleetFigures& fleet) {
  return json::object{{"workers", fleet.workers},    {"meets", fleet.meets}, {"p50_s", fleet.p50_s},
                      {"p95_s", fleet.p95_s},        {"p99_s", fleet.p99_s}, {"utilisation", fleet.utilisation},
                      {"gpu_hours", fleet.gpu_hours}};
}

std::vector<std::string> fleet_row(const std::string& kind, const simulation::FleetFigures& fleet,
                                   const std::string& more) {
  return {kind,
          std::to_string(fleet.workers),
          fleet.meets ? "met" : "missed",
          fmt::format("{:.2f} s", fleet.p50_s),
          fmt::format("{:.2f} s", fleet.p95_s),
          fmt::format("{:.2f} s", fleet.p99_s),
          fmt::format("{:.1f} %", 100 * fleet.utilisation),
          fmt::format("{:.2f}", fleet.gpu_hours),
          more};
}

std::string more_load(const simulation::Capacity& capacity) {
  if (!capacity.fleet.meets) return "-";
  if (capacity.load >= simulation::kMostLoad) return fmt::format("over {:.0f} %", 100 * (simulation::kMostLoad - 1));
  return fmt::format("{:.0f} %", 100 * (capacity.load - 1));
}

Result<simulation::Trace> trace_of(const CapacityFlags& flags, std::string& summary) {
  if (flags.trace.empty()) {
    auto history = read_history(flags.target, flags.from);
    if (!history) return history.error();
    summary = history->summary;
    return std::move(history->trace);
  }
  auto trace = simulation::read_trace(flags.trace);
  if (trace) summary = fmt::format("{} jobs", trace->jobs.size());
  return trace;
}

// Prints the answer. False: no fleet of some kind meets the objectives.
Result<bool> capacity(const CapacityFlags& flags) {
  std::vector<simulation::Objective> objectives;
  for (const std::string& text : flags.objectives) {
    const auto objective = simulation::parse_objective(text);
    if (!objective) return invalid_argument("--slo: " + objective.error().message);
    objectives.push_back(*objective);
  }
  const auto kinds = parse_kinds(flags.kinds);
  if (!kinds) return kinds.error();
  simulation::CostTable costs = simulation::observed_costs(kLookahead);
  if (!flags.costs.empty()) {
    auto table = simulation::read_cost_table(flags.costs);
    if (!table) return table.error();
    costs = *table;
  }
  std::string summary;
  const auto trace = trace_of(flags, summary);
  if (!trace) return trace.error();
  const auto& jobs = trace->jobs;
  const auto guessed = std::count_if(jobs.begin(), jobs.end(), [](const auto& job) { return job.run_us == 0; });
  if (guessed > 0 && flags.costs.empty()) {
    return invalid_argument(fmt::format("{} of {} jobs in {} have no run_ms; give --costs FILE for their run times",
                                        guessed, jobs.size(), flags.trace));
  }
  if (jobs.size() < kFewJobs) {
    std::fprintf(stderr, "ditfleet capacity: warning: %zu units say little about percentiles; use a longer history\n",
                 jobs.size());
  }
  json::array answers;
  std::vector<std::vector<std::string>> rows = {
      {"KIND", "WORKERS", "OBJECTIVE", "P50", "P95", "P99", "BUSY", "GPU HOURS", "MORE LOAD"}};
  bool met = true;
  for (const Kind& kind : *kinds) {
    const auto found = simulation::find_capacity(*trace, costs, objectives, kind.speed, flags.max_workers);
    if (!found) return found.error();
    met = met && found->fleet.meets;
    rows.push_back(fleet_row(kind.name, found->fleet, more_load(*found)));
    if (found->one_fewer && found->fleet.meets) rows.push_back(fleet_row("  one fewer", *found->one_fewer, ""));
    answers.push_back(
        json::object{{"kind", kind.name},
                     {"speed", kind.speed},
                     {"fleet", fleet_json(found->fleet)},
                     {"one_fewer", found->one_fewer ? fleet_json(*found->one_fewer) : json::value(nullptr)},
                     {"load", found->fleet.meets ? json::value(found->load) : json::value(nullptr)}});
  }
  const double span_h = static_cast<double>(jobs.back().at_us - jobs.front().at_us) / 3.6e9;
  if (flags.target.json) {
    print(
        json::object{{"jobs", summary}, {"units", jobs.size()}, {"span_hours", span_h}, {"kinds", std::move(answers)}});
  } else {
    std::printf("%s, arriving over %.2f h; every unit counts, from the first, on workers that start idle\n%s",
                summary.c_str(), span_h, table(rows).c_str());
  }
  if (!met) {
    std::fprintf(stderr, "ditfleet capacity: no fleet of up to %d workers meets the objective; see the missed rows\n",
                 flags.max_workers);
  }
  return met;
}

int run_capacity(CapacityFlags& flags) {
  if (flags.trace.empty()) {
    if (auto settled = settle(flags.target); !settled) return report("capacity", settled.error());
  }
  const auto met = capacity(flags);
  if (!met) return report("capacity", met.error());
  return *met ? kExitOk : kExitFailure;
}

}  // namespace

void add_capacity(CLI::App& app, Invocation& run) {
  auto* command = app.add_subcommand(
      "capacity", "Find the smallest fleet that meets latency objectives, by simulating the history or a trace");
  auto flags = std::make_shared<CapacityFlags>();
  add_target_flags(*command, flags->target);
  command->add_option("--slo", flags->objectives, "Objective, such as p95=20s; repeatable; p50, p95 or p99")
      ->type_name("PERCENTILE=TIME")
      ->allow_extra_args(false)
      ->required();
  auto* trace =
      command->add_option("--trace", flags->trace, "Jobs, as `ditfleet history export` writes them")->type_name("FILE");
  command->add_option("--from", flags->from, "Use the history since: an age (-24h, -7d) or a time in UTC")
      ->type_name("TIME")
      ->excludes(trace)
      ->capture_default_str();
  command
      ->add_option("--costs", flags->costs,
                   "Cost table (tests/sim/h200.json) for loads of adapters, and for runs without run_ms")
      ->type_name("FILE");
  command
      ->add_option("--kind", flags->kinds,
                   "A kind of worker and its speed relative to the observed ones, such as h200=1.4; repeatable")
      ->type_name("NAME=SPEED")
      ->allow_extra_args(false);
  command->add_option("--max-workers", flags->max_workers, "Largest fleet to try")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  command->callback([flags, &run] { run = [flags] { return run_capacity(*flags); }; });
}

}  // namespace ditfleet::cli
