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

}  // namespace ditfleet::simulation
