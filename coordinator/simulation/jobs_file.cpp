#include "coordinator/simulation/jobs_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "shared/core/output_file.h"

namespace ditfleet::simulation {

Result<void> write_jobs(const Trace& trace, const std::vector<Report>& reports, const std::string& path) {
  std::string text =
      "policy,at_ms,tenant,width,height,steps,adapter,slo_ms,worker,assigned_us,began_us,started_us,ended_us,host_"
      "misses,slot_miss,cold_class\n";
  for (const auto& report : reports) {
    auto policy = report.policy;
    std::replace(policy.begin(), policy.end(), ',', ' ');
    for (std::size_t i = 0; i < report.jobs.size(); ++i) {
      const auto& job = trace.jobs[i];
      const auto& served = report.jobs[i];
      fmt::format_to(std::back_inserter(text), "{},{},{},{},{},{},{},{},{},{},{},{},{},{},{:d},{:d}\n", policy,
                     job.at_us / 1000, job.tenant, job.width, job.height, job.steps, job.adapter, job.slo_us / 1000,
                     served.worker, served.assigned_us, served.began_us, served.started_us, served.ended_us,
                     served.host_misses, served.slot_miss, served.cold_class);
    }
  }
  return write_output_file(path, text);
}

}  // namespace ditfleet::simulation
