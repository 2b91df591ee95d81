// Reads the answer of Redis' command INFO.
#pragma once

#include <string_view>

#include "shared/core/text.h"

namespace ditfleet::redis {

// The value of a line "name:value"; empty if there is no such line. A view of `info`.
inline std::string_view info_value(std::string_view info, std::string_view name) {
  for (std::string_view line : split(info, '\n')) {
    if (take_part(line, ':') == name) return take_part(line, '\r');
  }
  return {};
}

}  // namespace ditfleet::redis
