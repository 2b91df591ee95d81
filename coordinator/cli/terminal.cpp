#include "coordinator/cli/terminal.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "shared/core/wall_clock.h"

namespace ditfleet::cli {
namespace {

bool continues(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

// Code points, which is close enough to columns for names and numbers.
std::size_t width_of(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) { return !continues(c); }));
}

}  // namespace

ProgressLine::ProgressLine(bool quiet) : shown_(!quiet && ::isatty(STDERR_FILENO) == 1) {}
ProgressLine::~ProgressLine() { clear(); }

void ProgressLine::draw(double part, const std::string& text) {
  if (!shown_) return;
  constexpr int kWidth = 32;
  std::string line;
  if (part >= 0) {
    const int filled = std::clamp(static_cast<int>(part * kWidth), 0, kWidth);
    line = "[" + std::string(static_cast<std::size_t>(filled), '#') +
           std::string(static_cast<std::size_t>(kWidth - filled), '.') + "] ";
  }
  std::fprintf(stderr, "\r\033[K%s%s", line.c_str(), text.c_str());
  std::fflush(stderr);
  drawn_ = true;
}

void ProgressLine::clear() {
  if (drawn_) std::fputs("\r\033[K", stderr);
  drawn_ = false;
}

std::string coloured(const std::string& state) {
  static const bool wanted = ::isatty(STDOUT_FILENO) == 1 && !std::getenv("NO_COLOR");
  constexpr std::string_view kGood = "|ready|running|succeeded|", kBad = "|failed|expired|rejected|silent|gone|stuck|",
                             kOdd = "|canceled|canceling|paused|draining|starting|";
  const auto is = [word = "|" + state + "|"](std::string_view words) { return words.find(word) != words.npos; };
  const char* colour = is(kGood) ? "\033[32m" : is(kBad) ? "\033[31m" : is(kOdd) ? "\033[33m" : nullptr;
  return wanted && colour ? colour + state + "\033[0m" : state;
}

std::string table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width_of(row[i]));
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      line += &row != &rows[0] && i < rows[0].size() && rows[0][i] == "STATE" ? coloured(row[i]) : row[i];
      if (i + 1 < row.size()) line.append(widths[i] - width_of(row[i]) + 2, ' ');
    }
    out += line + "\n";
  }
  return out;
}

std::string ago(std::int64_t then_ms) {
  if (then_ms <= 0) return {};
  const std::string since = whole_seconds(unix_ms() - then_ms);
  return since == "now" ? since : since + " ago";
}

std::string whole_seconds(std::int64_t ms) { return ms < 500 ? "now" : short_duration((ms + 500) / 1000 * 1'000'000); }

std::string one_line(const std::string& text, std::size_t max_characters) {
  std::string out;
  std::size_t characters = 0;
  for (std::size_t i = 0; i < text.size();) {
    std::size_t end = i + 1;
    while (end < text.size() && continues(text[end])) ++end;
    if (characters == max_characters) return out + "…";
    const auto byte = static_cast<unsigned char>(text[i]);
    const bool c1 = end == i + 2 && byte == 0xC2 &&
                    static_cast<unsigned char>(text[i + 1]) < 0xA0;  // U+009B begins an escape sequence, too
    if (c1 || (end == i + 1 && (byte < 0x20 || byte == 0x7F)))
      out += ' ';
    else
      out.append(text, i, end - i);
    ++characters;
    i = end;
  }
  return out;
}

}  // namespace ditfleet::cli
