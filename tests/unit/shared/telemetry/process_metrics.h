// Reads this process's own metrics.
#pragma once

#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "shared/telemetry/metrics.h"

namespace ditfleet::testing {

// Returns the first series of that name whose labels contain all these texts, or nullopt.
inline std::optional<double> series(const std::string& name, const std::vector<std::string>& labels = {}) {
  std::istringstream lines(telemetry::render_metrics());
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(name + "{") && !line.starts_with(name + " ")) continue;
    bool all = true;
    for (const auto& label : labels) all = all && line.find(label) != std::string::npos;
    if (all) return std::stod(line.substr(line.rfind(' ') + 1));
  }
  return std::nullopt;
}

}  // namespace ditfleet::testing
