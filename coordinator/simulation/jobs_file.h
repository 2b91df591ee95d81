// Writes when and where each simulated job ran.
#pragma once

#include <string>
#include <vector>

#include "coordinator/simulation/simulation.h"

namespace ditfleet::simulation {

// Comma-separated lines with the columns in tests/sim/README.md. Replaces an existing file.
Result<void> write_jobs(const Trace& trace, const std::vector<Report>& reports, const std::string& path);

}  // namespace ditfleet::simulation
