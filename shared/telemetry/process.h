// What Prometheus' client libraries export about a process, under their names, and the build. Thread-safe.
#pragma once

#include <string_view>

namespace ditfleet::telemetry {

// Reads /proc/self into the process_* metrics. collect_metrics() calls it.
void record_process();
// ditfleet_build_info; each program calls it once.
void show_build(std::string_view version, std::string_view revision);
double process_age_s();  // since the start of the process, in steps of 10 ms

}  // namespace ditfleet::telemetry
