// `ditfleet sim` compares routing policies on a trace; `ditfleet sim generate` writes a trace.
#include <spdlog/fmt/fmt.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "coordinator/cli/command.h"
#include "coordinator/cli/terminal.h"
#include "coordinator/simulation/policies.h"
#include "coordinator/simulation/simulation.h"
#include "shared/core/json.h"

namespace ditfleet::cli {
namespace {

struct SimOptions {
  std::string trace, costs;
  std::vector<std::string> policies = {"all"};
  simulation::SimulationOptions run;
  bool tune = false, json = false;
};

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

Result<simulation::Report> simulate_one(const simulation::Trace& trace, const simulation::CostTable& costs,
                                        simulation::SimulationOptions options, const std::string& text, bool tune) {
  auto policy = parse_policy(text);
  if (!policy) return policy.error();
  options.policy = *policy;
  return tune ? simulation::simulate_tuned(trace, costs, options) : simulation::simulate(trace, costs, options);
}

int run_sim(const SimOptions& options) {
  const auto costs = simulation::read_cost_table(options.costs);
  if (!costs) return report("sim", costs.error());
  const auto trace = simulation::read_trace(options.trace);
  if (!trace) return report("sim", trace.error());
  std::vector<std::string> policies;
  for (const auto& name : options.policies) {
    if (name != "all") {
      policies.push_back(name);
      continue;
    }
    for (const auto each : simulation::policy_names()) policies.emplace_back(each);
  }
  std::vector<std::vector<std::string>> rows = {{"POLICY", "P50", "P95", "P99", "SLO", "JOBS/S", "BUSY", "HOST MISSES",
                                                 "SLOT MISSES", "COLD", "GAP", "DECISION"}};
  for (const auto& name : policies) {
    const auto result = simulate_one(*trace, *costs, options.run, name, options.tune);
    if (!result) return report("sim", result.error());
    if (options.json) {
      json::object figures;
      for (const auto& figure : result->figures)
        figures[figure.metric] = json::object{{"value", figure.value}, {"unit", figure.unit}};
      print(json::object{{"policy", result->policy}, {"figures", std::move(figures)}});
      std::fflush(stdout);
      continue;
    }
    const auto f = [&](const char* metric) { return result->figure(metric); };
    rows.push_back({result->policy, fmt::format("{:.2f} s", f("latency_p50")),
                    fmt::format("{:.2f} s", f("latency_p95")), fmt::format("{:.2f} s", f("latency_p99")),
                    std::isnan(f("slo_attained")) ? "-" : fmt::format("{:.2f} %", 100 * f("slo_attained")),
                    fmt::format("{:.2f}", f("throughput")), fmt::format("{:.1f} %", 100 * f("utilisation")),
                    fmt::format("{:.0f} ({:.1f} %)", f("host_misses"), 100 * f("host_miss_ratio")),
                    fmt::format("{:.0f} ({:.1f} %)", f("slot_misses"), 100 * f("slot_miss_ratio")),
                    fmt::format("{:.0f}", f("cold_classes")), fmt::format("{:.2f}", f("fairness_gap")),
                    fmt::format("{:.1f} µs", f("decision_mean"))});
  }
  if (!options.json) std::fputs(table(rows).c_str(), stdout);
  return kExitOk;
}

Result<void> generate(const simulation::TraceOptions& options, const std::string& costs_file, const std::string& out) {
  const auto costs = simulation::read_cost_table(costs_file);
  if (!costs) return costs.error();
  std::error_code ignored;
  if (std::filesystem::equivalent(out, costs_file, ignored))
    return invalid_argument("'" + out + "' is an input and would be overwritten; name another file");
  const auto trace = simulation::generate_trace(options, *costs);
  if (!trace) return trace.error();
  return simulation::write_trace(*trace, out);
}

}  // namespace

void add_sim(CLI::App& app, Invocation& run) {
  auto* sim = app.add_subcommand(
      "sim", "Compare routing policies on a trace, with the service's scheduler and simulated workers");
  auto options = std::make_shared<SimOptions>();
  auto* trace = sim->add_option("--trace", options->trace, "Jobs (tests/sim/README.md)")->type_name("FILE");
  auto* costs = sim->add_option("--costs", options->costs, "Cost table (tests/sim/h200.json)")->type_name("FILE");
  sim->add_option("--policy", options->policies,
                  "NAME or NAME,TUNABLE=NUMBER,…; repeatable; all: every policy with its defaults")
      ->type_name("POLICY")
      ->allow_extra_args(false);
  sim->add_option("--workers", options->run.workers, "Number of workers; default: the number in the trace")
      ->check(CLI::Range(1, 100'000));
  sim->add_option("--warm-up", options->run.warm_up, "Share of the jobs, from the first, that is excluded from figures")
      ->capture_default_str();
  sim->add_option("--seed", options->run.seed, "Seed of the variation of runs")->capture_default_str();
  sim->add_flag("--tune", options->tune, "Tune each baseline: try its grid and show the lowest p95");
  sim->add_flag("--json", options->json, "Print one JSON object per policy");

  auto* trace_command = sim->add_subcommand("generate", "Write a trace");
  auto making = std::make_shared<simulation::TraceOptions>();
  auto file = std::make_shared<std::string>(), table_file = std::make_shared<std::string>();
  trace_command->add_option("--costs", *table_file, "Cost table; it determines the arrival rate for a load")
      ->type_name("FILE")
      ->required();
  trace_command->add_option("-o,--output", *file, "The trace")->type_name("FILE")->required();
  trace_command->add_option("--jobs", making->jobs, "Number of jobs")->capture_default_str();
  trace_command->add_option("--workers", making->workers, "Number of workers")->capture_default_str();
  trace_command->add_option("--load", making->load, "Share of the capacity of the workers")->capture_default_str();
  trace_command->add_option("--steps", making->steps, "Numbers of steps, drawn uniformly")
      ->delimiter(',')
      ->capture_default_str();
  trace_command->add_option("--adapters", making->adapters, "Number of adapters")->capture_default_str();
  trace_command->add_option("--zipf", making->zipf, "Exponent of Zipf's law for adapters")->capture_default_str();
  trace_command->add_option("--without-adapter", making->without_adapter, "Share of jobs without an adapter")
      ->capture_default_str();
  trace_command->add_option("--shapes", making->shapes, "Number of image sizes")->capture_default_str();
  trace_command->add_option("--tenants", making->tenants, "Number of tenants")->capture_default_str();
  trace_command->add_option("--burst", making->burst, "Arrival rate in a fifth of the time, relative to the mean")
      ->capture_default_str();
  trace_command->add_option("--seed", making->seed, "Seed of the trace")->capture_default_str();
  trace_command->callback([making, file, table_file, &run] {
    run = [making, file, table_file] {
      const auto done = generate(*making, *table_file, *file);
      return done ? kExitOk : report("sim generate", done.error());
    };
  });

  sim->require_subcommand(0, 1);
  sim->callback([sim, trace, costs, options, &run] {
    if (!sim->get_subcommands().empty()) return;
    if (trace->empty() || costs->empty()) throw CLI::RequiredError("--trace and --costs");
    run = [options] { return run_sim(*options); };
  });
}

}  // namespace ditfleet::cli
