// The name of this host.
#pragma once

#include <unistd.h>

#include <string>

namespace ditfleet {

// Thread-safe. "unknown" if the system has no name.
inline std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "unknown";
}

}  // namespace ditfleet
