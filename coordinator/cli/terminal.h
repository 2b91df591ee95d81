// Text for a terminal: a progress line, tables, times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ditfleet::cli {

// A line on stderr that is redrawn. Draws nothing if stderr is not a terminal or `quiet` is set.
class ProgressLine {
 public:
  explicit ProgressLine(bool quiet);
  ~ProgressLine();  // clear()
  // "[#########.......] 12/28 text"; a `total` of 0 draws the text alone.
  void draw(int done, int total, const std::string& text);
  void clear();
  bool shown() const { return shown_; }

 private:
  bool shown_;
  bool drawn_ = false;
};

// Columns padded to their widest cell, with two spaces between them. The first row is the header.
std::string table(const std::vector<std::vector<std::string>>& rows);

std::string short_duration(std::int64_t us);  // "850 µs", "12.3 ms", "4.21 s", "3 min 5 s"
std::string ago(std::int64_t then_ms);        // "12 s ago"; empty for 0
std::string one_line(const std::string& text,
                     std::size_t max_characters);  // control characters become spaces; cut with …

}  // namespace ditfleet::cli
