#include "coordinator/simulation/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include "coordinator/simulation/random.h"
#include "coordinator/simulation/range.h"
#include "shared/core/bytes.h"
#include "shared/core/output_file.h"
#include "shared/core/text.h"

namespace ditfleet::simulation {
namespace {

constexpr std::string_view kHeader = "at_ms,tenant,width,height,steps,adapter,slo_ms";
constexpr std::string_view kHeaderWithRun = "at_ms,tenant,width,height,steps,adapter,slo_ms,run_ms";
// Common sizes of up to 1 megapixel, the most popular first.
constexpr std::array<std::pair<int, int>, 12> kShapes = {{{1024, 1024},
                                                          {1216, 832},
                                                          {832, 1216},
                                                          {768, 768},
                                                          {1344, 768},
                                                          {768, 1344},
                                                          {512, 512},
                                                          {1152, 896},
                                                          {896, 1152},
                                                          {768, 512},
                                                          {512, 768},
                                                          {640, 640}}};
constexpr double kBurstCycleUs = 60e6, kBurstPart = 0.2;

constexpr std::size_t kMaxNameBytes = 128;              // as in shared/job/validate.h
constexpr double kLongestUs = 10.0 * 365 * 24 * 3.6e9;  // between the first and the last generated arrival

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

// Draws an index by Zipf's law.
class Zipf {
 public:
  Zipf(int count, double exponent) {
    double sum = 0;
    for (int i = 1; i <= count; ++i) up_to_.push_back(sum += 1.0 / std::pow(i, exponent));
  }
  int draw(Random& random) const {
    const double at = random.unit() * up_to_.back();
    return static_cast<int>(std::lower_bound(up_to_.begin(), up_to_.end(), at) - up_to_.begin());
  }

 private:
  std::vector<double> up_to_;
};

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

Result<Trace> generate_trace(const TraceOptions& o, const CostTable& costs) {
  struct Given {
    const char* name;
    double value;
    Range range;
  };
  std::vector<Given> given = {{"jobs", 1.0 * o.jobs, whole(1, 2'000'000)},
                              {"workers", 1.0 * o.workers, kWorkers},
                              {"adapters", 1.0 * o.adapters, whole(0, 1'000'000)},
                              {"tenants", 1.0 * o.tenants, whole(1, 1000)},
                              {"shapes", 1.0 * o.shapes, whole(1, kShapes.size())},
                              {"zipf", o.zipf, real(0, 10)},
                              {"load", o.load, real(0.001, 1000)},
                              {"burst", o.burst, real(1, 0.99 / kBurstPart)},
                              {"without-adapter", o.without_adapter, real(0, 1)},
                              {"slo_factor", o.slo_factor, real(0, 1e6)},
                              {"slo_slack_ms", 1.0 * static_cast<double>(o.slo_slack_ms), whole(0, 1e6)}};
  for (const int s : o.steps) given.push_back({"steps", 1.0 * s, kSteps});
  if (o.steps.empty()) return invalid_argument("steps is empty; give at least one number");
  for (const auto& [name, value, range] : given) {
    if (!range.has(value)) return range.error(name, fmt::format("{}", value));
  }
  Random random(o.seed);
  const Zipf adapter_law(std::max(1, o.adapters), o.zipf), shape_law(o.shapes, 0.8);
  std::vector<double> tenant_up_to;
  for (int t = 0; t < o.tenants; ++t) tenant_up_to.push_back((t > 0 ? tenant_up_to.back() : 0.0) + std::pow(2.0, -t));
  Trace trace;
  trace.workers = o.workers;
  double work_us = 0;
  for (int i = 0; i < o.jobs; ++i) {
    const auto [width, height] = kShapes[static_cast<std::size_t>(shape_law.draw(random))];
    TraceJob job{.width = width, .height = height, .steps = o.steps[random.below(o.steps.size())]};
    const double who = random.unit() * tenant_up_to.back();
    job.tenant =
        fmt::format("t{}", std::lower_bound(tenant_up_to.begin(), tenant_up_to.end(), who) - tenant_up_to.begin());
    if (o.adapters > 0 && random.unit() >= o.without_adapter)
      job.adapter = fmt::format("a{:03}", adapter_law.draw(random));
    const auto run = costs.run_us(width, height, job.steps, !job.adapter.empty());
    job.slo_us =
        static_cast<std::int64_t>(o.slo_factor * static_cast<double>(run)) / 1000 * 1000 + o.slo_slack_ms * 1000;
    work_us += static_cast<double>(run);
    trace.jobs.push_back(std::move(job));
  }
  const double mean_gap_us = work_us / o.jobs / o.workers / o.load;
  if (mean_gap_us * o.jobs > kLongestUs) {
    return invalid_argument(
        fmt::format("{} jobs at a load of {} on {} workers take {:.3g} years to arrive; it must be at most 10", o.jobs,
                    o.load, o.workers, 10 * mean_gap_us * o.jobs / kLongestUs));
  }
  const double quiet = (1.0 - o.burst * kBurstPart) / (1.0 - kBurstPart);
  double at = 0;
  for (auto& job : trace.jobs) {
    // Arrivals at rate 1, stretched by the current rate.
    double left = -std::log(1.0 - random.unit()) * mean_gap_us;
    while (true) {
      const double phase = std::fmod(at, kBurstCycleUs);
      const bool burst = phase < kBurstCycleUs * kBurstPart;
      const double rate = burst ? o.burst : quiet, until = (burst ? kBurstCycleUs * kBurstPart : kBurstCycleUs) - phase;
      if (left <= until * rate) {
        at += left / rate;
        break;
      }
      left -= until * rate;
      at += until + 1e-3;  // past the rounding error
    }
    job.at_us = static_cast<std::int64_t>(at) / 1000 * 1000;
  }
  std::string steps;
  for (const int s : o.steps) steps += (steps.empty() ? "" : "/") + std::to_string(s);
  trace.about = fmt::format(
      "workers={} jobs={} load={} steps={} adapters={} zipf={} without_adapter={} shapes={} tenants={} burst={} "
      "seed={}",
      o.workers, o.jobs, o.load, steps, o.adapters, o.zipf, o.without_adapter, o.shapes, o.tenants, o.burst, o.seed);
  return trace;
}

}  // namespace ditfleet::simulation
