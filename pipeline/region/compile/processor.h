// Identifies this machine's processor.
#pragma once

#include <string>

namespace ditfleet::region {

// Model and features from /proc/cpuinfo, one line each; empty if it has none.
const std::string& processor_features();

}  // namespace ditfleet::region
