// Text for a terminal: a progress line, tables, times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shared/core/short_numbers.h"

namespace ditfleet::cli {

// A line on stderr that is redrawn. Draws nothing if stderr is not a terminal or `quiet` is set.
class ProgressLine {
 public:
  explicit ProgressLine(bool quiet);
  ~ProgressLine();  // clear()
  // "[#########.......] text"; `part`: 0 … 1, negative to draw the text alone.
  void draw(double part, const std::string& text);
  void clear();
  bool shown() const { return shown_; }

 private:
  bool shown_;
  bool drawn_ = false;
};

// Columns padded to their widest cell, with two spaces between them. The first row is the header. On a terminal the
// column STATE is coloured, unless NO_COLOR is set.
std::string table(const std::vector<std::vector<std::string>>& rows);

std::string whole_seconds(std::int64_t ms);  // "12 s"; "now" for less than half a second
std::string ago(std::int64_t then_ms);       // "12 s ago", "now"; empty for 0
std::string one_line(const std::string& text,
                     std::size_t max_characters);  // control characters become spaces; cut with …

}  // namespace ditfleet::cli
