// "Did you mean …?" for misspelt keys, fields, flags and models. Thread-safe.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ditfleet {

// The known name with the smallest edit distance to `name` (insert, delete, replace, swap of neighbours; case ignored).
// Empty if no distance is within max(2, a third of the longer name).
std::string nearest_name(std::string_view name, const std::vector<std::string>& known);

// "; did you mean 'x'?" if a name is near, else "; known are a, b, c"; empty if `known` is.
std::string suggestion(std::string_view name, const std::vector<std::string>& known);

}  // namespace ditfleet
