#include "shared/core/short_numbers.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <iterator>

namespace ditfleet {

std::string short_duration(std::int64_t us) {
  const auto value = static_cast<double>(us);
  if (us < 0) return "-";
  if (us > 0 && us < 1000) return fmt::format("{} µs", us);
  if (us < 9'950) return fmt::format("{:.2g} ms", std::round(value / 1e2) / 10);
  if (us < 999'500) return fmt::format("{:.0f} ms", value / 1e3);
  if (us < 119'950'000) return fmt::format("{:.4g} s", std::round(value / 1e5) / 10);
  const std::int64_t s = (us + 500'000) / 1'000'000;
  return s < 7200 ? fmt::format("{} min {} s", s / 60, s % 60) : fmt::format("{} h {} min", s / 3600, s / 60 % 60);
}

std::string json_text(const json::value& value) {
  const std::string text = json::serialize(value);  // a double always has an E
  std::string out;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    out += text[i];
    if (in_string && text[i] == '\\') {
      out += text[++i];
    } else if (text[i] == '"') {
      in_string = !in_string;
    } else if (text[i] == 'E' && !in_string) {
      const std::size_t from = text.find_last_of("[{:, ", i) + 1;  // npos + 1 is 0
      double number = 0;
      const char* end = std::from_chars(text.data() + from, text.data() + text.size(), number).ptr;
      char shortest[32];
      out.resize(out.size() - (i + 1 - from));
      out.append(shortest, std::to_chars(std::begin(shortest), std::end(shortest), number).ptr);
      i = static_cast<std::size_t>(end - text.data()) - 1;
    }
  }
  return out;
}

}  // namespace ditfleet
