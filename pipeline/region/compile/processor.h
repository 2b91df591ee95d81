// What this machine's processor is.
#pragma once

#include <string>

namespace ditfleet::region {

// Its model and features as /proc/cpuinfo has them, a line each; empty where that says nothing of them.
const std::string& processor_features();

}  // namespace ditfleet::region
