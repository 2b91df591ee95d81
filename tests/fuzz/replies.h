// Redis' replies made from the input of a fuzz target.
#pragma once

#include <algorithm>
#include <string_view>

#include "shared/redis/connection.h"

namespace ditfleet::fuzz {

inline redis::Reply text_reply(std::string_view text) {
  redis::Reply reply;
  reply.type = redis::Reply::Type::kString;
  reply.text = text;
  return reply;
}

// An array of the texts between bytes 0xFE, which no valid UTF-8 has.
inline redis::Reply array_reply(std::string_view input) {
  redis::Reply array;
  array.type = redis::Reply::Type::kArray;
  while (!input.empty()) {
    const auto end = std::min(input.find('\xFE'), input.size());
    array.elements.push_back(text_reply(input.substr(0, end)));
    input.remove_prefix(std::min(end + 1, input.size()));
  }
  return array;
}

}  // namespace ditfleet::fuzz
