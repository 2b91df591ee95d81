// Compares routing policies on a trace, with the service's scheduler and simulated workers; README.md. Prints a JSON
// object for each policy. `fleet_sim generate` writes a trace.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>
#include <vector>

#include "coordinator/simulation/simulation.h"
#include "shared/core/json.h"
#include "tests/sim/generate_trace.h"
#include "tests/sim/policies.h"

namespace {

using namespace ditfleet;

// "name,tunable=value,…"
Result<simulation::PolicyOptions> parse_policy(const std::string& text) {
  simulation::PolicyOptions out;
  std::size_t from = text.find(',');
  out.name = text.substr(0, from);
  while (from != std::string::npos) {
    const auto end = text.find(',', from + 1);
    const std::string item = text.substr(from + 1, end == std::string::npos ? end : end - from - 1);
    const auto equals = item.find('=');
    char* after = nullptr;
    const std::string value = equals == std::string::npos ? "" : item.substr(equals + 1);
    const double number = std::strtod(value.c_str(), &after);
    if (value.empty() || *after != '\0')
      return invalid_argument("'" + text + "' is not a policy; write NAME or NAME,TUNABLE=NUMBER,…");
    if (!out.tunables.emplace(item.substr(0, equals), number).second)
      return invalid_argument("'" + text + "' has " + item.substr(0, equals) + " twice");
    from = end;
  }
  return out;
}

Result<void> compare(const std::string& trace_file, const std::string& costs_file, std::vector<std::string> policies,
                     const simulation::SimulationOptions& options, bool tune) {
  const auto costs = simulation::read_cost_table(costs_file);
  if (!costs) return costs.error();
  const auto trace = simulation::read_trace(trace_file);
  if (!trace) return trace.error();
  if (policies == std::vector<std::string>{"all"}) {
    const auto all = simulation::policy_names();
    policies.assign(all.begin(), all.end());
  }
  for (const std::string& text : policies) {
    const auto policy = parse_policy(text);
    if (!policy) return policy.error();
    const auto report = tune ? simulation::simulate_tuned(*trace, *costs, options, *policy)
                             : simulation::simulate(*trace, *costs, options, *policy);
    if (!report) return report.error();
    json::object figures;
    for (const auto& figure : report->figures)
      figures[figure.metric] = json::object{{"value", figure.value}, {"unit", figure.unit}};
    std::puts(json::serialize(json::object{{"policy", report->policy}, {"figures", std::move(figures)}}).c_str());
    std::fflush(stdout);
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Compares routing policies on a trace, with the service's scheduler and simulated workers");
  std::string trace, costs, out;
  std::vector<std::string> policies = {"all"};
  simulation::SimulationOptions options;
  bool tune = false;
  app.add_option("--trace", trace, "Jobs (README.md)")->type_name("FILE");
  app.add_option("--policy", policies, "NAME or NAME,TUNABLE=NUMBER,…; repeatable; all: every policy")
      ->type_name("POLICY")
      ->allow_extra_args(false);
  app.add_option("--workers", options.workers, "Number of workers; default: the number in the trace");
  app.add_option("--warm-up", options.warm_up, "Share of the jobs, from the first, that is excluded from figures")
      ->capture_default_str();
  app.add_option("--seed", options.seed, "Seed of the variation of runs")->capture_default_str();
  app.add_flag("--tune", tune, "Tune each baseline: try its grid and show the lowest p95");
  auto& generate = *app.add_subcommand("generate", "Write a trace");
  simulation::TraceOptions made;
  generate.add_option("-o,--output", out, "The trace")->type_name("FILE")->required();
  generate.add_option("--jobs", made.jobs, "Number of jobs")->capture_default_str();
  generate.add_option("--workers", made.workers, "Number of workers")->capture_default_str();
  generate.add_option("--load", made.load, "Share of the capacity of the workers")->capture_default_str();
  generate.add_option("--steps", made.steps, "Numbers of steps, drawn uniformly")
      ->delimiter(',')
      ->capture_default_str();
  generate.add_option("--adapters", made.adapters, "Number of adapters")->capture_default_str();
  generate.add_option("--zipf", made.zipf, "Exponent of Zipf's law for adapters")->capture_default_str();
  generate.add_option("--without-adapter", made.without_adapter, "Share of jobs without an adapter")
      ->capture_default_str();
  generate.add_option("--shapes", made.shapes, "Number of image sizes")->capture_default_str();
  generate.add_option("--tenants", made.tenants, "Number of tenants")->capture_default_str();
  generate.add_option("--burst", made.burst, "Arrival rate in a fifth of the time, relative to the mean")
      ->capture_default_str();
  generate.add_option("--seed", made.seed, "Seed of the trace")->capture_default_str();
  for (CLI::App* each : {&app, &generate})
    each->add_option("--costs", costs, "Cost table (h200.json)")->type_name("FILE");
  CLI11_PARSE(app, argc, argv);
  Result<void> done;
  if (generate.parsed()) {
    const auto table = simulation::read_cost_table(costs);
    const auto written = table ? simulation::generate_trace(made, *table) : Result<simulation::Trace>(table.error());
    done = written ? simulation::write_trace(*written, out) : Result<void>(written.error());
  } else {
    done = compare(trace, costs, policies, options, tune);
  }
  if (!done) std::fprintf(stderr, "fleet_sim: %s\n", done.error().message.c_str());
  return done ? 0 : 1;
}
