// Reads a flat reply [field, value, field, value, …] as a map.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>

#include "shared/redis/connection.h"

namespace ditfleet::queue {

using Fields = std::unordered_map<std::string_view, std::string_view>;

// Views into the reply.
inline Fields fields_of(const redis::Reply& flat) {
  Fields fields;
  for (std::size_t i = 0; i + 1 < flat.elements.size(); i += 2) {
    fields.emplace(flat.elements[i].text, flat.elements[i + 1].text);
  }
  return fields;
}

inline std::string text_of(const Fields& fields, std::string_view name) {
  const auto it = fields.find(name);
  return it == fields.end() ? std::string() : std::string(it->second);
}

}  // namespace ditfleet::queue
