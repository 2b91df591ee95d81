// `ditfleet explain JOB`: where a job's time went, why each unit ran on its worker, what a waiting unit waits for.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>

#include "coordinator/cli/command.h"
#include "coordinator/cli/http_client.h"
#include "coordinator/cli/job_watch.h"
#include "coordinator/cli/json_fields.h"
#include "coordinator/cli/terminal.h"
#include "shared/core/wall_clock.h"

namespace ditfleet::cli {
namespace {

struct Assignment {
  std::string worker, reason;
  std::int64_t at_ms = 0;
  std::string back;  // why the unit was returned to the queue; empty: it was not
  std::int64_t back_ms = 0;
};

// The assignments of each unit, oldest first. Only the job's events have them.
using History = std::map<std::int64_t, std::vector<Assignment>>;

const std::vector<Assignment>& assignments_of(const History& history, const json::value& unit) {
  static const std::vector<Assignment> kNone;
  const auto found = history.find(integer(unit, "unit"));
  return found == history.end() ? kNone : found->second;
}

History read_history(HttpClient& client, const std::string& id) {
  History history;
  std::string last_id;
  // The stream of an ended job ends. For a running job, the events so far are enough. Without events, which expire with
  // the job, the record alone is explained.
  constexpr std::chrono::milliseconds kEnough(700);
  const auto until = std::chrono::steady_clock::now() + kEnough;
  (void)client.events("/v1/jobs/" + id + "/events", last_id, kEnough, [&](const ServerEvent& event) {
    const auto data = parse_json(event.data);
    if (!data) return HttpClient::Next::kGoOn;
    const auto unit = integer(*data, "unit", -1);
    if (event.type == "assigned") {
      history[unit].push_back({text(*data, "worker"), text(*data, "reason"), integer(*data, "at_ms"), {}, 0});
    }
    if (event.type == "ready" && !history[unit].empty() && history[unit].back().back.empty()) {
      auto& last = history[unit].back();
      const std::string message = text(*data, "message");
      last.back = text(*data, "reason") + (message.empty() ? "" : ": " + message);
      last.back_ms = integer(*data, "at_ms");
    }
    return is_terminal_event(event) || std::chrono::steady_clock::now() > until ? HttpClient::Next::kStop
                                                                                : HttpClient::Next::kGoOn;
  });
  return history;
}

std::int64_t span_us(std::int64_t from_ms, std::int64_t to_ms) {
  return from_ms > 0 && to_ms >= from_ms ? (to_ms - from_ms) * 1000 : -1;
}

// The spans of one unit in order of time; -1: it has not begun. The last span of an unfinished unit ends now.
std::vector<std::pair<std::string, std::int64_t>> spans_of(const json::value& job, const json::value& unit,
                                                           const std::vector<Assignment>& given) {
  const auto created = integer(job, "created_ms"), ready = integer(job, "ready_ms");
  const auto assigned = integer(unit, "assigned_ms"), started = integer(unit, "started_ms"),
             ended = integer(unit, "ended_ms");
  const auto until = ended > 0 ? ended : unix_ms();
  std::vector<std::pair<std::string, std::int64_t>> spans = {{"admission", span_us(created, ready)}};
  if (given.size() > 1 || (given.size() == 1 && assigned == 0)) {  // "queue" is the wait for the first assignment only
    spans.emplace_back("queue", span_us(ready, given.front().at_ms));
    spans.emplace_back("tried before", span_us(given.front().at_ms, assigned > 0 ? assigned : until));
  } else {
    spans.emplace_back("queue", span_us(ready, assigned > 0 ? assigned : until));
  }
  std::int64_t in_phases = 0;
  static const std::vector<std::string> kOrder = {"adapter", "text", "wait", "denoise", "vae", "encode", "store"};
  const json::value& phases = field(unit, "phases_us");
  const auto add = [&](const std::string& name) {
    spans.emplace_back(name, integer(phases, name));
    in_phases += integer(phases, name);
  };
  for (const std::string& name : kOrder) {
    if (field(phases, name).is_number()) add(name);
  }
  if (const auto* object = phases.if_object()) {
    for (const auto& phase : *object) {
      const std::string name(phase.key());
      if (std::find(kOrder.begin(), kOrder.end(), name) == kOrder.end() && phase.value().is_number()) add(name);
    }
  }
  // The worker reports its phases at the end. They begin when it reads its mailbox, before `started`.
  if (in_phases == 0) {
    spans.emplace_back(started > 0 ? "until started" : "not started", span_us(assigned, started > 0 ? started : until));
    spans.emplace_back("run", span_us(started, until));
  }
  if (const std::int64_t held = span_us(assigned, ended); in_phases > 0 && held > in_phases)
    spans.emplace_back("hand-over", held - in_phases);
  return spans;
}

void explain_text(const json::value& job, const History& history) {
  std::printf("job %s: %s", text(job, "id").c_str(), text(job, "state").c_str());
  const std::int64_t total = span_us(integer(job, "created_ms"), integer(job, "ended_ms"));
  if (total >= 0) std::printf(" after %s", short_duration(total).c_str());
  std::printf("\nclass %s; predicted cost per unit %s\n", text(job, "class").c_str(),
              short_duration(integer(job, "cost_us")).c_str());
  if (const std::string why = text(field(job, "error"), "message"); !why.empty())
    std::printf("error: %s\n", why.c_str());

  for (const json::value& unit : items(job, "unit_records")) {
    std::printf("\nunit %s: %s, attempt %s\n", text(unit, "unit").c_str(), text(unit, "state").c_str(),
                text(unit, "attempt").c_str());
    if (const std::string why = text(field(unit, "error"), "message"); !why.empty())
      std::printf("  error: %s\n", why.c_str());
    const auto& given = assignments_of(history, unit);
    for (const Assignment& a : given) {
      std::printf("  assigned to %s%s%s\n", a.worker.c_str(), a.reason.empty() ? "" : ": ", a.reason.c_str());
      if (!a.back.empty())
        std::printf("  returned to the queue after %s: %s\n", short_duration((a.back_ms - a.at_ms) * 1000).c_str(),
                    a.back.c_str());
    }
    if (const std::string worker = text(unit, "worker"); given.empty() && !worker.empty())
      std::printf("  ran on %s\n", worker.c_str());
    if (const std::string what = text(unit, "waits_for"); !what.empty()) std::printf("  waits for %s\n", what.c_str());
    std::vector<std::vector<std::string>> rows;
    const auto spans = spans_of(job, unit, given);
    std::int64_t longest = 1;
    for (const auto& [name, us] : spans) longest = std::max(longest, us);
    for (const auto& [name, us] : spans) {
      if (us < 0) continue;
      rows.push_back({"  " + name, short_duration(us), std::string(static_cast<std::size_t>(us * 40 / longest), '#')});
    }
    std::fputs(table(rows).c_str(), stdout);
  }
}

json::object explain_json(const json::value& job, const History& history) {
  json::array units;
  for (const json::value& unit : items(job, "unit_records")) {
    const auto& given = assignments_of(history, unit);
    json::object spans;
    for (const auto& [name, us] : spans_of(job, unit, given)) {
      if (us >= 0) spans[name] = us;
    }
    json::array assignments;
    for (const Assignment& a : given) {
      json::object assignment{{"worker", a.worker}, {"reason", a.reason}, {"at_ms", a.at_ms}};
      if (!a.back.empty()) {
        assignment["back"] = a.back;
        assignment["back_ms"] = a.back_ms;
      }
      assignments.push_back(std::move(assignment));
    }
    units.push_back(json::object{{"unit", field(unit, "unit")},
                                 {"state", field(unit, "state")},
                                 {"attempt", field(unit, "attempt")},
                                 {"worker", field(unit, "worker")},
                                 {"error", field(unit, "error")},
                                 {"waits_for", field(unit, "waits_for")},
                                 {"assignments", std::move(assignments)},
                                 {"spans_us", std::move(spans)}});
  }
  return {{"id", field(job, "id")},           {"state", field(job, "state")}, {"class", field(job, "class")},
          {"cost_us", field(job, "cost_us")}, {"error", field(job, "error")}, {"units", std::move(units)}};
}

Result<void> explain(const Target& target, const std::string& id) {
  if (auto valid = check_job_id(id); !valid) return valid;
  HttpClient client(target);
  const auto job = client.json("GET", "/v1/jobs/" + id);
  if (!job) return job.error();
  const History history = read_history(client, id);
  if (target.json)
    print(explain_json(*job, history));
  else
    explain_text(*job, history);
  return {};
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
