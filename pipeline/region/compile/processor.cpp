#include "pipeline/region/compile/processor.h"

#include "shared/core/bytes.h"

namespace ditfleet::region {

namespace {

std::string read_features() {
  const auto told = read_file("/proc/cpuinfo");
  std::string features;
  if (!told) return features;
  for (const char* field : {"model name", "flags", "CPU part", "Features"}) {  // x86's, then Arm's
    const auto at = told->find(field);
    if (at != std::string::npos) features += told->substr(at, told->find('\n', at) - at) + "\n";
  }
  return features;
}

}  // namespace

// Read once: with many cores the kernel takes milliseconds to produce that file.
const std::string& processor_features() {
  static const std::string features = read_features();
  return features;
}

}  // namespace ditfleet::region
