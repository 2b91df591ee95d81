// The time of day, for stored and displayed times. Measure durations with a steady clock.
#pragma once

#include <chrono>
#include <cstdint>

namespace ditfleet {

// Milliseconds since 1970.
inline std::int64_t unix_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace ditfleet
