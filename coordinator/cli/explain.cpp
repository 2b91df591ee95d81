// `ditfleet explain JOB`: where a job's time went, why each unit ran on its worker, what a waiting unit waits for.
#include <fmt/format.h>

#include <algorithm>

#include "coordinator/cli/command.h"
#include "coordinator/cli/http_client.h"
#include "coordinator/cli/job_watch.h"
#include "coordinator/cli/json_fields.h"
#include "coordinator/cli/terminal.h"

namespace ditfleet::cli {
namespace {

std::string error_line(const json::value& of, const char* indent) {
  const std::string why = text(field(of, "error"), "message");
  return why.empty() ? why : fmt::format("{}error: {}\n", indent, why);
}

// What the worker of an open unit does.
std::string holder_text(const json::value& unit) {
  const json::value& holder = field(unit, "holder");
  if (!holder.is_object()) return {};
  const auto time = [&](const char* name) { return short_duration(integer(holder, name) * 1000); };
  std::string out;
  if (integer(unit, "total_steps") > 0 && field(holder, "event_ago_ms").is_number())
    out += fmt::format("  step {}/{}, reported {} ago\n", text(unit, "step"), text(unit, "total_steps"),
                       time("event_ago_ms"));
  out += fmt::format("  worker {}: {}", text(holder, "worker"), text(holder, "state"));
  if (field(holder, "lease_ms").is_number())
    out += fmt::format(
        " for {}; its lease ends in about {}, then {}", time("unheard_ms"), time("lease_ms"),
        field(holder, "others") == json::value(true) ? "another worker takes the unit" : "the unit waits for a worker");
  else if (field(holder, "unheard_ms").is_number())
    out += fmt::format(", last heartbeat {} ago", time("unheard_ms"));
  return out + "\n";
}

std::string unit_text(const json::value& unit) {
  std::string out =
      fmt::format("\nunit {}: {}, attempt {}\n", text(unit, "unit"), text(unit, "state"), text(unit, "attempt")) +
      error_line(unit, "  ");
  for (const json::value& a : items(unit, "attempts")) {
    const std::string reason = text(a, "reason"), back = text(a, "back");
    out += fmt::format("  assigned to {}{}{}\n", text(a, "worker"), reason.empty() ? "" : ": ", reason);
    if (!back.empty()) {
      const auto held_us = (integer(a, "ended_ms") - integer(a, "assigned_ms")) * 1000;
      out += fmt::format("  returned to the queue after {}: {}\n", short_duration(held_us), back);
    }
  }
  if (const std::string what = text(unit, "waits_for"); !what.empty()) out += fmt::format("  waits for {}\n", what);
  out += holder_text(unit);
  std::int64_t longest = 1;
  for (const json::value& span : items(unit, "spans")) longest = std::max(longest, integer(span, "us"));
  std::vector<std::vector<std::string>> rows;
  for (const json::value& span : items(unit, "spans")) {
    const auto us = integer(span, "us");
    rows.push_back(
        {"  " + text(span, "name"), short_duration(us), std::string(static_cast<std::size_t>(us * 40 / longest), '#')});
  }
  out += table(rows);
  if (const auto skipped = integer(field(unit, "result"), "skipped_steps"); skipped > 0)
    out += fmt::format("  skipped most of {} of {} steps (cache)\n", skipped, text(unit, "total_steps"));
  if (const auto us = integer(unit, "actual_us"); us > 0)
    out += fmt::format("  ran {}, predicted {}\n", short_duration(us), short_duration(integer(unit, "predicted_us")));
  if (const json::value& speed = field(unit, "worker_speed"); speed.is_number())
    out += fmt::format("  {} runs at {:.2f} of the predicted speed\n", text(unit, "worker"), speed.to_number<double>());
  for (const json::value& over : items(unit, "over")) {
    const std::string worker = text(over, "worker");
    out += fmt::format("  {} took {} longer than {}{}\n", text(over, "phase"), short_duration(integer(over, "over_us")),
                       text(over, "than"), worker.empty() ? "" : "; worker " + worker + " is slow");
  }
  return out;
}

std::string explain_text(const json::value& job) {
  std::string out = fmt::format("job {}: {}", text(job, "id"), text(job, "state"));
  const std::int64_t created = integer(job, "created_ms"), ended = integer(job, "ended_ms");
  if (created > 0 && ended >= created) out += " after " + short_duration((ended - created) * 1000);
  if (const std::string outlook = outlook_text(job); !outlook.empty()) out += "; " + outlook;
  out += fmt::format("\nclass {}; predicted cost per unit {}\n", text(job, "class"),
                     short_duration(integer(job, "cost_us"))) +
         error_line(job, "");
  for (const json::value& unit : items(job, "unit_records")) out += unit_text(unit);
  return out;
}

Result<void> explain(const Target& target, const std::string& id) {
  if (auto valid = check_job_id(id); !valid) return valid;
  return print_answer(target, HttpClient(target).json("GET", "/v1/jobs/" + id + "/timeline"), explain_text);
}

}  // namespace

void add_explain(CLI::App& app, Invocation& run) {
  auto target = std::make_shared<Target>();
  auto id = std::make_shared<std::string>();
  auto* command = app.add_subcommand("explain", "Show where a job's time went and why each worker was chosen");
  command->add_option("job", *id, "The job's id")->required();
  add_target_flags(*command, *target);
  command->callback([target, id, &run] {
    run = [target, id] { return run_on("explain", *target, [&] { return explain(*target, *id); }); };
  });
}

}  // namespace ditfleet::cli
