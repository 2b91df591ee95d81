// "Did you mean …?" for misspelt keys, fields, flags and models. Thread safe.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ditfleet {

// The known name with the fewest edits (insert, delete, replace, swap of neighbours; case ignored) from
// `name`; empty if every one is further than a third of the longer of the two, but at least two edits.
std::string nearest_name(std::string_view name, const std::vector<std::string>& known);

// "; did you mean 'x'?" where one is near, else "; known are a, b, c" (nothing known: empty).
std::string suggestion(std::string_view name, const std::vector<std::string>& known);

}  // namespace ditfleet
