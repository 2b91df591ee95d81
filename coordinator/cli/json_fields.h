// Fields of the service's responses, with defaults for missing ones.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "shared/core/short_numbers.h"

namespace ditfleet::cli {

// Null if the field is missing or `from` is not an object.
inline const json::value& field(const json::value& from, std::string_view name) {
  static const json::value kNone = nullptr;
  const auto* object = from.if_object();
  const auto* value = object ? object->if_contains(name) : nullptr;
  return value ? *value : kNone;
}

// Returns a string unchanged and a number as digits; else returns an empty string.
inline std::string text(const json::value& from, std::string_view name) {
  const json::value& value = field(from, name);
  if (value.is_string()) return std::string(value.get_string());
  return value.is_number() ? json_text(value) : std::string();
}

inline std::int64_t integer(const json::value& from, std::string_view name, std::int64_t otherwise = 0) {
  const json::value& value = field(from, name);
  if (const auto* i = value.if_int64()) return *i;
  if (const auto* d = value.if_double()) return static_cast<std::int64_t>(*d);
  return otherwise;
}

inline const json::array& items(const json::value& from, std::string_view name) {
  static const json::array kNone;
  const json::value& value = field(from, name);
  return value.is_array() ? value.get_array() : kNone;
}

// The texts of a list, separated by commas; `none` if there are none.
inline std::string names(const json::value& from, std::string_view name, const char* none) {
  std::string out;
  for (const json::value& item : items(from, name)) {
    if (item.is_string()) out += (out.empty() ? "" : ",") + std::string(item.get_string());
  }
  return out.empty() ? none : out;
}

}  // namespace ditfleet::cli
