// Integers in stored formats, little-endian on every machine.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace ditfleet {

template <class Int>
void append_little_endian(std::string& out, Int value) {
  for (std::size_t i = 0; i < sizeof value; ++i) out += static_cast<char>(static_cast<std::uint64_t>(value) >> (8 * i));
}

template <class Int>
std::string little_endian(Int value) {
  std::string out;
  append_little_endian(out, value);
  return out;
}

// Reads the first bytes; missing bytes count as 0.
template <class Int>
Int from_little_endian(std::string_view bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < std::min(bytes.size(), sizeof(Int)); ++i)
    value |= static_cast<std::uint64_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  return static_cast<Int>(value);
}

}  // namespace ditfleet
