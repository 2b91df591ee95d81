// `ditfleet explain JOB`: where a job's time went, and why each unit ran where it ran, or what it waits for.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>

#include "coordinator/cli/command.h"
#include "coordinator/cli/http_client.h"
#include "coordinator/cli/job_watch.h"
#include "coordinator/cli/json_fields.h"
#include "coordinator/cli/terminal.h"
#include "shared/core/ids.h"

namespace ditfleet::cli {
namespace {

struct Assignment {
  std::string worker, reason;
  std::int64_t at_ms = 0;
};

// What the events of a job say beyond its record.
struct History {
  std::map<std::int64_t, std::vector<Assignment>> assignments;  // by unit, oldest first
  std::map<std::int64_t, int> starts;
};

History read_history(HttpClient& client, const std::string& id) {
  History history;
  std::string last_id;
  // Ended jobs' streams end by themselves; of one that runs, what there is by now is enough, though its steps keep coming.
  // Without events (they expire with the job) the record alone is explained.
  constexpr std::chrono::milliseconds kEnough(700);
  const auto until = std::chrono::steady_clock::now() + kEnough;
  (void)client.events(
      "/v1/jobs/" + id + "/events", last_id, kEnough, [&](const ServerEvent& event) {
        const auto data = parse_json(event.data);
        if (!data) return HttpClient::Next::kGoOn;
        const auto unit = integer(*data, "unit", -1);
        if (event.type == "assigned") {
          std::string worker = text(*data, "worker");
          if (worker.empty()) worker = text(*data, "owner");
          history.assignments[unit].push_back(
              {worker.substr(0, worker.find(':')), text(*data, "reason"), integer(*data, "at_ms")});
        }
        if (event.type == "started") ++history.starts[unit];
        return is_terminal_event(event) || std::chrono::steady_clock::now() > until ? HttpClient::Next::kStop : HttpClient::Next::kGoOn;
      });
  return history;
}

std::int64_t span_us(std::int64_t from_ms, std::int64_t to_ms) {
  return from_ms > 0 && to_ms >= from_ms ? (to_ms - from_ms) * 1000 : -1;
}

// The spans of one unit, in the order in which they passed; -1 where one has not.
std::vector<std::pair<std::string, std::int64_t>> spans_of(const json::value& job, const json::value& unit) {
  const auto created = integer(job, "created_ms"), ready = integer(job, "ready_ms");
  const auto assigned = integer(unit, "assigned_ms"), started = integer(unit, "started_ms"),
             ended = integer(unit, "ended_ms");
  std::vector<std::pair<std::string, std::int64_t>> spans = {
      {"admission", span_us(created, ready)}, {"queue", span_us(ready, assigned)}};
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
      if (std::find(kOrder.begin(), kOrder.end(), name) == kOrder.end() && phase.value().is_number())
        add(name);
    }
  }
  // The worker tells its phases at the end; they begin when it reads its mailbox, before `started`.
  if (in_phases == 0) spans.emplace_back("until started", span_us(assigned, started));
  if (const std::int64_t held = span_us(assigned, ended); in_phases > 0 && held > in_phases)
    spans.emplace_back("hand-over", held - in_phases);
  return spans;
}

void explain_text(const json::value& job, const History& history) {
  std::printf("job %s: %s", text(job, "id").c_str(), text(job, "state").c_str());
  const std::int64_t total = span_us(integer(job, "created_ms"), integer(job, "ended_ms"));
  if (total >= 0) std::printf(" after %s", short_duration(total).c_str());
  std::printf("\nclass %s; predicted cost of a unit %s\n", text(job, "class").c_str(),
              short_duration(integer(job, "cost_us")).c_str());
  if (const std::string why = text(field(job, "error"), "message"); !why.empty())
    std::printf("error: %s\n", why.c_str());

  for (const json::value& unit : items(job, "unit_records")) {
    const auto index = integer(unit, "unit");
    std::printf("\nunit %s: %s, attempt %s\n", text(unit, "unit").c_str(), text(unit, "state").c_str(),
                text(unit, "attempt").c_str());
    if (const std::string why = text(field(unit, "error"), "message"); !why.empty())
      std::printf("  error: %s\n", why.c_str());
    if (const auto found = history.assignments.find(index); found != history.assignments.end()) {
      for (const Assignment& a : found->second) {
        std::printf("  given to %s%s%s\n", a.worker.c_str(), a.reason.empty() ? "" : ": ", a.reason.c_str());
      }
    } else if (const std::string worker = text(unit, "worker"); !worker.empty()) {
      std::printf("  ran on %s\n", worker.c_str());
    }
    if (const std::string what = text(unit, "waits_for"); !what.empty()) std::printf("  waits for %s\n", what.c_str());
    std::vector<std::vector<std::string>> rows;
    const auto spans = spans_of(job, unit);
    std::int64_t longest = 1;
    for (const auto& [name, us] : spans) longest = std::max(longest, us);
    for (const auto& [name, us] : spans) {
      if (us < 0) continue;
      rows.push_back(
          {"  " + name, short_duration(us), std::string(static_cast<std::size_t>(us * 40 / longest), '#')});
    }
    std::fputs(table(rows).c_str(), stdout);
  }
}

json::object explain_json(const json::value& job, const History& history) {
  json::array units;
  for (const json::value& unit : items(job, "unit_records")) {
    json::object spans;
    for (const auto& [name, us] : spans_of(job, unit)) {
      if (us >= 0) spans[name] = us;
    }
    json::array assignments;
    if (const auto found = history.assignments.find(integer(unit, "unit"));
        found != history.assignments.end()) {
      for (const Assignment& a : found->second)
        assignments.push_back(json::object{{"worker", a.worker}, {"reason", a.reason}, {"at_ms", a.at_ms}});
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
  if (!is_valid_id(id))
    return invalid_argument("'" + id +
                            "' is no job id; one has 1 to 64 letters, digits, dots, dashes and underscores");
  HttpClient client(target);
  const auto job = client.json("GET", "/v1/jobs/" + id);
  if (!job) return job.error();
  const History history = read_history(client, id);
  if (target.json)
    std::printf("%s\n", json::serialize(explain_json(*job, history)).c_str());
  else
    explain_text(*job, history);
  return {};
}

}  // namespace

void add_explain(CLI::App& app, Invocation& run) {
  auto target = std::make_shared<Target>();
  auto id = std::make_shared<std::string>();
  auto* command = app.add_subcommand("explain", "Where a job's time went, and why this worker");
  command->add_option("job", *id, "The job's id")->required();
  add_target_flags(*command, *target);
  command->callback([target, id, &run] {
    run = [target, id] {
      auto done = settle(*target);
      if (done) done = explain(*target, *id);
      return done ? kExitOk : report("explain", done.error());
    };
  });
}

}  // namespace ditfleet::cli
