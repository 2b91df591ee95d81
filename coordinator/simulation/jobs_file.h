// When and where each simulated job ran, as a file.
#pragma once

#include <string>
#include <vector>

#include "coordinator/simulation/simulation.h"

namespace ditfleet::simulation {

// A file of comma-separated lines, the trace's columns and those of `jobs` (as in tests/sim/README.md): who doubts a
// figure can count it again. Replaces what was there.
Result<void> write_jobs(const Trace& trace, const std::vector<Report>& reports, const std::string& path);

}  // namespace ditfleet::simulation
