#pragma once

#include <cstdint>
#include <string>

#include "shared/core/json.h"

namespace ditfleet {

// "850 µs", "3.2 ms", "70 ms", "3.2 s", "3 min 5 s", "2 h 3 min"; "-" if negative.
std::string short_duration(std::int64_t us);

// The value as text. A number is the shortest decimal with its value: 0.7, where json::serialize() writes 7E-1.
std::string json_text(const json::value& value);

}  // namespace ditfleet
