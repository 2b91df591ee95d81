// JSON with correctly rounded numbers. Boost.JSON 1.81 rounds the last digit of some 17-digit numbers wrongly.
// Unigram pieces with equal scores would then compare as unequal.
#pragma once

#include <string_view>

#include "shared/core/json.h"

namespace ditfleet::pipeline {

// Like parse_json(), but numbers with a fraction or an exponent become the nearest double.
Result<json::value> parse_exact_json(std::string_view text);

}  // namespace ditfleet::pipeline
