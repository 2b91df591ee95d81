// "Did you mean …?" for misspelt keys, fields, flags and models. Thread-safe.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ditfleet {

// Returns the known name with the smallest edit distance to `name`. Edits are inserting, deleting, replacing and
// swapping adjacent characters; case is ignored. Empty if every distance is above
// max(2, length of the longer name / 3).
std::string nearest_name(std::string_view name, const std::vector<std::string>& known);

// Returns "; did you mean 'x'?" if there is a nearest name, else "; known are a, b, c". Empty if `known` is empty.
std::string suggestion(std::string_view name, const std::vector<std::string>& known);

}  // namespace ditfleet
