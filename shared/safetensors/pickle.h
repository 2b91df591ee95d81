// Detects pickle files, which are often passed instead of safetensors files and must not be loaded.
#pragma once

#include <cstddef>
#include <string_view>

namespace ditfleet::safetensors {

// The number of bytes that is_pickle() needs. Every safetensors file has at least as many.
inline constexpr std::size_t kPickleBegin = 9;

// Whether a file is from torch.save: a ZIP archive or, from old versions, a bare pickle. The length in a safetensors
// header may start with the same bytes, but is followed by '{'.
inline bool is_pickle(std::string_view begin) {
  if (begin.size() >= kPickleBegin && begin[kPickleBegin - 1] == '{') return false;
  return begin.starts_with(std::string_view("PK\x03\x04", 4)) ||
         (begin.size() >= 2 && begin[0] == '\x80' && begin[1] >= 1 && begin[1] <= 5);
}

}  // namespace ditfleet::safetensors
