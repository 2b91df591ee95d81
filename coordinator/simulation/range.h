// Allowed values of a number from a file or an option. NaN is never in range.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <string>

#include "shared/core/result.h"

namespace ditfleet::simulation {

struct Range {
  double least = 0, most = 0;
  bool whole = false;

  bool has(double value) const { return value >= least && value <= most && (!whole || value == std::floor(value)); }
  // "steps is 500; it must be a whole number from 1 to 200"
  Error error(const std::string& what, const std::string& value) const {
    return invalid_argument(fmt::format("{} is {}; it must be a {}number from {:.12g} to {:.12g}", what, value,
                                        whole ? "whole " : "", least, most));
  }
};

inline Range whole(double least, double most) { return {least, most, true}; }
inline Range real(double least, double most) { return {least, most, false}; }

inline const Range kSteps = whole(1, 200), kWorkers = whole(1, 100'000), kAtMs = whole(0, 1e13), kSloMs = whole(0, 1e9),
                   kRunMs = whole(0, 1e9);

}  // namespace ditfleet::simulation
