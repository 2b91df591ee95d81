// What is often given for a safetensors file and must not be read.
#pragma once

#include <cstddef>
#include <string_view>

namespace ditfleet::safetensors {

// Bytes that is_pickle() wants to see; no safetensors file has fewer.
inline constexpr std::size_t kPickleBegin = 9;

// Whether a file begins as torch.save writes it: a ZIP archive or, long ago, a bare pickle. A safetensors header, whose
// length may begin with the same bytes, is told by its '{'.
inline bool is_pickle(std::string_view begin) {
  if (begin.size() >= kPickleBegin && begin[kPickleBegin - 1] == '{') return false;
  return begin.starts_with(std::string_view("PK\x03\x04", 4)) ||
         (begin.size() >= 2 && begin[0] == '\x80' && begin[1] >= 1 && begin[1] <= 5);
}

}  // namespace ditfleet::safetensors
