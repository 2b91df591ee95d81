// Boost.JSON, built once in json.cpp. Include this instead of <boost/json.hpp>.
#pragma once

#include <boost/json.hpp>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "shared/core/result.h"

namespace ditfleet {

namespace json = boost::json;

// Parses strict JSON of at most 64 levels. kInvalidArgument: the message contains the position of the error. The value
// is allocated in `storage`, which must outlive the value; the default is the heap.
Result<json::value> parse_json(std::string_view text, json::storage_ptr storage = {});

// The strings of a JSON array. Skips other items. Empty if the value is not an array.
std::vector<std::string> strings_of(const json::value& value);

// Reads a field into a string, a bool, an integer or a list of strings. Leaves `out` as it is if the field is absent or
// has another type. For records that another version may have written.
template <class T>
void read_field(const json::object& object, std::string_view name, T& out) {
  const json::value* value = object.if_contains(name);
  if (value == nullptr) return;
  if constexpr (std::is_same_v<T, std::string>) {
    if (const auto* text = value->if_string()) out = *text;
  } else if constexpr (std::is_same_v<T, bool>) {
    if (const auto* flag = value->if_bool()) out = *flag;
  } else if constexpr (std::is_integral_v<T>) {
    if (const auto* number = value->if_int64()) out = static_cast<T>(*number);
  } else {
    out = strings_of(*value);
  }
}

}  // namespace ditfleet
