#include "coordinator/cli/history.h"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <map>
#include <memory>

#include "coordinator/cli/http_client.h"
#include "coordinator/cli/json_fields.h"
#include "shared/core/text.h"
#include "shared/core/wall_clock.h"
#include "shared/job/shape_class.h"

namespace ditfleet::cli {
namespace {

struct HistoryFlags {
  Target target;
  std::string from = "-24h", output = "/dev/stdout";
};

Result<void> export_history(const HistoryFlags& flags) {
  const auto history = read_history(flags.target, flags.from);
  if (!history) return history.error();
  if (auto written = simulation::write_trace(history->trace, flags.output); !written) return written;
  std::fprintf(stderr, "%s\n", history->summary.c_str());
  return {};
}

}  // namespace

Result<std::int64_t> parse_from(const std::string& from, std::int64_t now_ms) {
  static const std::map<char, std::int64_t> kUnits = {{'m', 60'000}, {'h', 3'600'000}, {'d', 86'400'000}};
  std::string_view ago = from;
  if (ago.starts_with('-')) ago.remove_prefix(1);
  if (!ago.empty() && kUnits.contains(ago.back())) {
    const auto number = number_of<std::int64_t>(ago.substr(0, ago.size() - 1), 1, 100'000);
    if (number) return now_ms - *number * kUnits.at(ago.back());
  }
  for (const char* format : {"%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d"}) {
    std::tm time = {};
    const char* end = ::strptime(from.c_str(), format, &time);
    if (end != nullptr && *end == '\0') return static_cast<std::int64_t>(::timegm(&time)) * 1000;
  }
  return invalid_argument("--from is '" + from +
                          "'; write an age such as -24h or -7d, or a time such as 2026-11-24T08:00:00Z");
}

Result<HistoryTrace> read_history(const Target& target, const std::string& from) {
  const auto from_ms = parse_from(from, unix_ms());
  if (!from_ms) return from_ms.error();
  HttpClient client(target);
  HistoryTrace out;
  std::size_t jobs = 0, not_succeeded = 0, no_run = 0, no_fit = 0;
  std::string after = std::to_string(std::max<std::int64_t>(0, *from_ms));
  do {
    const auto page = client.json("GET", "/v1/history?after=" + after);
    if (!page) return page.error();
    for (const json::value& job : items(*page, "jobs")) {
      simulation::TraceJob line{.at_us = integer(job, "created_ms") * 1000,
                                .tenant = text(job, "tenant"),
                                .steps = static_cast<int>(integer(job, "steps")),
                                .adapter = text(job, "adapter"),
                                .run_us = integer(job, "run_ms") * 1000};
      if (line.at_us < *from_ms * 1000) continue;
      const auto shape = job::parse_class_key(text(job, "class"));
      if (shape) {
        line.width = shape->width;
        line.height = shape->height;
      }
      if (text(job, "state") != "succeeded") {
        ++not_succeeded;
      } else if (line.run_us <= 0) {
        ++no_run;
      } else if (!shape || !simulation::check_shape(line.width, line.height, line.steps)) {
        ++no_fit;
      } else {
        ++jobs;
        for (std::int64_t unit = 0; unit < integer(job, "units", 1); ++unit) out.trace.jobs.push_back(line);
      }
    }
    after = text(*page, "next_cursor");
  } while (!after.empty());
  out.summary = fmt::format(
      "{} jobs with {} units; omitted: {} that did not succeed, {} without a run time, {} that do not fit into a trace",
      jobs, out.trace.jobs.size(), not_succeeded, no_run, no_fit);
  if (jobs == 0) return not_found("the history since " + from + " has no jobs to simulate: " + out.summary);
  auto& lines = out.trace.jobs;
  std::stable_sort(lines.begin(), lines.end(), [](const auto& a, const auto& b) { return a.at_us < b.at_us; });
  const auto first_us = lines.front().at_us;
  for (auto& line : lines) line.at_us -= first_us;
  out.trace.about = fmt::format("from {}, at_ms 0 is {} ms since 1970; {}", target.url, first_us / 1000, out.summary);
  return out;
}

void add_history(CLI::App& app, Invocation& run) {
  auto* history = app.add_subcommand("history", "The history of ended jobs");
  history->require_subcommand(1);
  auto flags = std::make_shared<HistoryFlags>();
  auto* command = history->add_subcommand("export", "Write the jobs that succeeded as a trace for `ditfleet capacity`");
  add_target_flags(*command, flags->target);
  command->add_option("--from", flags->from, "Only jobs created since: an age (-24h, -7d) or a time in UTC")
      ->type_name("TIME")
      ->capture_default_str();
  command->add_option("-o,--output", flags->output, "The trace; default: stdout")->type_name("FILE");
  command->callback([flags, &run] {
    run = [flags] { return run_on("history export", flags->target, [&] { return export_history(*flags); }); };
  });
}

}  // namespace ditfleet::cli
