#include "shared/core/nearest_name.h"

#include <algorithm>
#include <cstddef>

namespace ditfleet {
namespace {

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// Optimal string alignment distance.
std::size_t edits(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before_last(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const bool same = lower(a[i - 1]) == lower(b[j - 1]);
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (same ? 0 : 1)});
      if (i > 1 && j > 1 && lower(a[i - 1]) == lower(b[j - 2]) && lower(a[i - 2]) == lower(b[j - 1])) {
        row[j] = std::min(row[j], before_last[j - 2] + 1);
      }
    }
    before_last = last;
    last = row;
  }
  return last[b.size()];
}

}  // namespace

std::string nearest_name(std::string_view name, const std::vector<std::string>& known) {
  if (name.size() > 128) return {};
  std::string best;
  std::size_t best_edits = 0;
  for (const std::string& candidate : known) {
    const std::size_t n = edits(name, candidate);
    const std::size_t allowed = std::max<std::size_t>(2, std::max(name.size(), candidate.size()) / 3);
    if (n > allowed || n >= std::max(name.size(), candidate.size())) continue;
    if (best.empty() || n < best_edits) best = candidate, best_edits = n;
  }
  return best;
}

std::string suggestion(std::string_view name, const std::vector<std::string>& known) {
  if (const std::string near = nearest_name(name, known); !near.empty()) return "; did you mean '" + near + "'?";
  std::string list;
  for (const std::string& candidate : known) list += (list.empty() ? "; known are " : ", ") + candidate;
  return list;
}

}  // namespace ditfleet
