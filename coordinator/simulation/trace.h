// Whom a simulation serves: jobs with their arrival, shape and adapter. A file of comma-separated lines,
//
//   # workers=16 load=0.8 …                      what made it; `workers` is the fleet it is meant for
//   at_ms,tenant,width,height,steps,adapter,slo_ms
//   12,acme,1024,1024,4,a017,1900
//
// in order of arrival; an empty adapter is none, slo_ms 0 is no objective.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "coordinator/simulation/cost_table.h"
#include "shared/core/result.h"

namespace ditfleet::simulation {

struct TraceJob {
  std::int64_t at_us = 0;
  std::string tenant;
  int width = 0, height = 0, steps = 0;
  std::string adapter;
  std::int64_t slo_us = 0;
  int line = 0;  // of its file; 0: it was not read from one
};

struct Trace {
  int workers = 0;    // 0: it does not say
  std::string about;  // the first line, without its mark
  std::vector<TraceJob> jobs;
};

// kNotFound: no such file. kInvalidArgument names the line.
Result<Trace> read_trace(const std::string& path);
Result<void> write_trace(const Trace& trace, const std::string& path);

// Poisson arrivals at `load` of what the workers can do at best (warm, adapters in slots), in bursts: for a fifth of
// the time `burst` times as many, the rest of it so much fewer that the mean holds. Adapters by Zipf's law, shapes
// likewise with 1024² first, tenants with unequal shares (4 : 2 : 1 …).
struct TraceOptions {
  int jobs = 5000, workers = 16, adapters = 200, shapes = 12, tenants = 3;
  double zipf = 0.9, load = 0.8, burst = 1.5;
  double without_adapter = 0.1;     // part of the jobs
  std::vector<int> steps = {4};     // drawn evenly
  double slo_factor = 3.0;          // objective: so many times the best run, and
  std::int64_t slo_slack_ms = 500;  // this
  std::uint64_t seed = 1;
};
// kInvalidArgument: an option makes no sense.
Result<Trace> generate_trace(const TraceOptions& options, const CostTable& costs);

}  // namespace ditfleet::simulation
