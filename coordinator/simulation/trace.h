// The jobs of a simulation with their arrival, shape and adapter. The file format is comma-separated lines,
//
//   # workers=16 load=0.8 …                      how the trace was made; `workers` is the size of the fleet
//   at_ms,tenant,width,height,steps,adapter,slo_ms
//   12,acme,1024,1024,4,a017,1900
//
// in the order of arrival. The adapter may be empty. slo_ms 0: no objective. A column run_ms may follow, the observed
// run time. It replaces the run time of the cost table, with its variation and cold class. 0: not observed.
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
  std::int64_t run_us = 0;  // observed; 0: unknown
  int line = 0;             // in its file; 0: not read from a file
};

struct Trace {
  int workers = 0;    // 0: unknown
  std::string about;  // the first line, without "# "
  std::vector<TraceJob> jobs;
};

// kNotFound: no such file. kInvalidArgument: a malformed line; the message contains its number.
Result<Trace> read_trace(const std::string& path);
// Writes the column run_ms if a job has a run time.
Result<void> write_trace(const Trace& trace, const std::string& path);
// Whether a trace may contain such a job; otherwise the error that read_trace() would return, without a line number.
Result<void> check_shape(int width, int height, int steps);

// Poisson arrivals at `load` times the capacity of the workers, which is computed for warm workers with all adapters in
// slots. For a fifth of the time the rate is `burst` times the mean, else lower, so that the mean holds. Adapters and
// shapes follow Zipf's law, with 1024² as the most frequent shape. Tenants have shares of 4 : 2 : 1 : ….
struct TraceOptions {
  int jobs = 5000, workers = 16, adapters = 200, shapes = 12, tenants = 3;
  double zipf = 0.9, load = 0.8, burst = 1.5;
  double without_adapter = 0.1;     // share of the jobs
  std::vector<int> steps = {4};     // drawn uniformly
  double slo_factor = 3.0;          // objective: this times the best run,
  std::int64_t slo_slack_ms = 500;  // plus this
  std::uint64_t seed = 1;
};
// kInvalidArgument: an option is out of range.
Result<Trace> generate_trace(const TraceOptions& options, const CostTable& costs);

}  // namespace ditfleet::simulation
