// Variables of this process' environment.
#pragma once

#include <cstdlib>
#include <string>

namespace ditfleet {

// Empty if it is not set. Thread-safe as long as nobody changes the environment.
inline std::string environment_variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

}  // namespace ditfleet
