// Tables that ids index. Ids are small and reused.
#pragma once

#include <cstddef>
#include <vector>

namespace ditfleet::scheduling {

// The element with this index. Extends the table if needed.
template <class T>
T& grown(std::vector<T>& table, std::size_t index) {
  if (index >= table.size()) table.resize(index + 1);
  return table[index];
}

// The element with this index, or an empty one beyond the end.
template <class T>
const T& peek(const std::vector<T>& table, std::size_t index) {
  if (index < table.size()) return table[index];
  static const T kNone{};
  return kNone;
}

// The index of a free element, else of a new one.
template <class T, class Id>
Id take_id(std::vector<T>& table, std::vector<Id>& free) {
  if (free.empty()) {
    table.emplace_back();
    return static_cast<Id>(table.size() - 1);
  }
  const Id id = free.back();
  free.pop_back();
  return id;
}

}  // namespace ditfleet::scheduling
