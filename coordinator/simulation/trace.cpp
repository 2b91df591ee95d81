#include "coordinator/simulation/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include "coordinator/simulation/range.h"
#include "shared/core/bytes.h"
#include "shared/core/output_file.h"
#include "shared/core/text.h"

namespace ditfleet::simulation {
namespace {

constexpr std::string_view kHeader = "at_ms,tenant,width,height,steps,adapter,slo_ms";
constexpr std::string_view kHeaderWithRun = "at_ms,tenant,width,height,steps,adapter,slo_ms,run_ms";
constexpr std::size_t kMaxNameBytes = 128;  // as in shared/job/validate.h

bool is_name(std::string_view text) { return text.size() <= kMaxNameBytes && is_valid_utf8(text); }

// The numeric columns of a line.
struct Column {
  std::size_t at;
  const char* name;
  Range range;
};
const std::array<Column, 6> kColumns = {{{0, "at_ms", kAtMs},
                                         {2, "width", whole(16, 2048)},
                                         {3, "height", whole(16, 2048)},
                                         {4, "steps", kSteps},
                                         {6, "slo_ms", kSloMs},
                                         {7, "run_ms", kRunMs}}};

}  // namespace

Result<void> check_shape(int width, int height, int steps) {
  for (const auto& [at, number] : {std::pair(1, width), {2, height}, {3, steps}}) {
    const auto& column = kColumns[static_cast<std::size_t>(at)];
    if (!column.range.has(number)) return column.range.error(column.name, fmt::format("'{}'", number));
  }
  if (width % 16 != 0 || height % 16 != 0) return invalid_argument("width and height must be multiples of 16");
  return {};
}

Result<Trace> read_trace(const std::string& path) {
  auto text = read_file(path);
  if (!text) return text.error();
  Trace trace;
  std::string_view rest = *text;
  if (rest.starts_with("\xef\xbb\xbf")) rest.remove_prefix(3);  // byte order mark
  int line_number = 0;
  std::size_t fields = 0;  // 0: no header yet
  while (!rest.empty()) {
    const auto end = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, end);
    if (line.ends_with('\r')) line.remove_suffix(1);  // Windows line end
    rest.remove_prefix(std::min(end + 1, rest.size()));
    ++line_number;
    const auto wrong = [&](const std::string& what) {
      return invalid_argument(fmt::format("{}, line {}: {}", path, line_number, what));
    };
    if (line.empty()) continue;
    if (line.front() == '#') {
      if (trace.about.empty()) trace.about = line.substr(std::min<std::size_t>(2, line.size()));
      const auto at = line.find("workers=");
      if (at != std::string_view::npos) {
        const auto digits = line.substr(at + 8);
        const auto given = digits.substr(0, digits.find(' '));
        const auto workers = number_of<int>(given);
        if (!workers || !kWorkers.has(*workers)) return wrong(kWorkers.error("workers=", std::string(given)).message);
        trace.workers = *workers;
      }
      continue;
    }
    if (fields == 0) {
      fields = line == kHeader ? 7 : line == kHeaderWithRun ? 8 : 0;
      if (fields == 0) return wrong(fmt::format("the header line must be {} or {}", kHeader, kHeaderWithRun));
      continue;
    }
    const auto field = split(line, ',');
    if (field.size() != fields)
      return wrong(fmt::format("a job has the fields {}", fields == 7 ? kHeader : kHeaderWithRun));
    std::array<std::int64_t, 6> n{};
    for (std::size_t i = 0; i < kColumns.size(); ++i) {
      const auto& column = kColumns[i];
      if (column.at >= fields) continue;
      const auto number = number_of<std::int64_t>(field[column.at]);
      if (!number || !column.range.has(static_cast<double>(*number)))
        return wrong(column.range.error(column.name, "'" + std::string(field[column.at]) + "'").message);
      n[i] = *number;
    }
    if (auto fits = check_shape(static_cast<int>(n[1]), static_cast<int>(n[2]), static_cast<int>(n[3])); !fits)
      return wrong(fits.error().message);
    if (field[1].empty() || !is_name(field[1]))
      return wrong(fmt::format("the tenant must be 1 to {} bytes of UTF-8", kMaxNameBytes));
    if (!is_name(field[5]))
      return wrong(fmt::format("the adapter must be at most {} bytes of UTF-8, or empty", kMaxNameBytes));
    if (!trace.jobs.empty() && n[0] * 1000 < trace.jobs.back().at_us)
      return wrong("jobs must be in the order of arrival");
    trace.jobs.push_back({.at_us = n[0] * 1000,
                          .tenant = std::string(field[1]),
                          .width = static_cast<int>(n[1]),
                          .height = static_cast<int>(n[2]),
                          .steps = static_cast<int>(n[3]),
                          .adapter = std::string(field[5]),
                          .slo_us = n[4] * 1000,
                          .run_us = n[5] * 1000,
                          .line = line_number});
  }
  if (trace.jobs.empty())
    return invalid_argument(path + " has no jobs; a trace has one line per job below " + std::string(kHeader));
  return trace;
}

Result<void> write_trace(const Trace& trace, const std::string& path) {
  const bool with_run =
      std::any_of(trace.jobs.begin(), trace.jobs.end(), [](const TraceJob& job) { return job.run_us > 0; });
  std::string text = fmt::format("# {}\n{}\n", trace.about, with_run ? kHeaderWithRun : kHeader);
  for (const auto& job : trace.jobs) {
    text += fmt::format("{},{},{},{},{},{},{}", job.at_us / 1000, job.tenant, job.width, job.height, job.steps,
                        job.adapter, job.slo_us / 1000);
    text += with_run ? fmt::format(",{}\n", job.run_us / 1000) : "\n";
  }
  return write_output_file(path, text);
}

}  // namespace ditfleet::simulation
