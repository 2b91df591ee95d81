// `ditfleet jobs {list,slow,show,watch,cancel,pause,resume}`.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "coordinator/cli/command.h"
#include "coordinator/cli/http_client.h"
#include "coordinator/cli/job_watch.h"
#include "coordinator/cli/json_fields.h"
#include "coordinator/cli/terminal.h"
#include "shared/job/state.h"

namespace ditfleet::cli {
namespace {

struct JobFlags {
  Target target;
  std::string id, state, cursor, class_key;
  int limit = 20;
};

// Empty for a job that ended without all of its images: its progress is 1, too.
std::string progress_text(const json::value& job) {
  const auto state = job::state_from_name(text(job, "state"));
  const json::value& progress = field(job, "progress");
  if (!progress.is_number() || (state && job::is_terminal(*state) && *state != job::State::kSucceeded)) return "";
  return "  " + std::to_string(static_cast<int>(progress.to_number<double>() * 100)) + " %";
}

// "ready (2 jobs ahead, 12 s left)"
std::string state_text(const json::value& job) {
  const std::string outlook = outlook_text(job);
  return text(job, "state") + (outlook.empty() ? "" : " (" + outlook + ")");
}

Result<void> list(const JobFlags& flags) {
  if (!flags.state.empty() && !job::state_from_name(flags.state)) {
    return invalid_argument(
        "--state is '" + flags.state +
        "'; it must be queued, paused, ready, assigned, running, canceling, succeeded, failed, canceled, expired or "
        "rejected");
  }
  constexpr int kMaxPage = 200;  // the service's limit
  HttpClient client(flags.target);
  json::array jobs;
  std::string next = flags.cursor;
  do {
    const int left = flags.limit - static_cast<int>(jobs.size());
    std::string path = "/v1/jobs?limit=" + std::to_string(std::min(left, kMaxPage));
    if (!flags.state.empty()) path += "&state=" + flags.state;
    if (!next.empty()) path += "&cursor=" + percent_encoded(next);
    const auto page = client.json("GET", path);
    if (!page) return page.error();
    for (const json::value& job : items(*page, "jobs")) jobs.push_back(job);
    next = text(*page, "next_cursor");
  } while (!next.empty() && static_cast<int>(jobs.size()) < flags.limit);
  if (flags.target.json) {
    print(json::object{{"object", "list"}, {"jobs", std::move(jobs)}, {"next_cursor", next}});
    return {};
  }
  std::vector<std::vector<std::string>> rows = {{"ID", "STATE", "MODEL", "UNITS", "CREATED", "PROMPT"}};
  for (const json::value& job : jobs) {
    rows.push_back({text(job, "id"), state_text(job), text(job, "model"), text(job, "units"),
                    ago(integer(job, "created_ms")), one_line(text(field(job, "spec"), "prompt"), 60)});
  }
  std::fputs(table(rows).c_str(), stdout);
  if (!next.empty()) std::printf("more: --cursor %s\n", next.c_str());
  return {};
}

std::string slow_text(const json::value& answer) {
  std::vector<std::vector<std::string>> rows = {
      {"ID", "STATE", "TOOK", "BLAME", "OVER", "WORKER", "TRIES", "ENDED", "CLASS"}};
  for (const json::value& job : items(answer, "jobs")) {
    const json::value& blame = field(job, "blame");
    const std::string phase = text(blame, "phase");
    const bool worker = phase.empty() ? field(job, "worker_speed").is_number() : !text(blame, "worker").empty();
    const std::string blamed = worker ? "worker " + text(job, "worker") + " slow" + (phase.empty() ? "" : ": " + phase)
                               : phase.empty() ? "-"
                                               : phase;
    rows.push_back({text(job, "id"), text(job, "state"), short_duration(integer(job, "total_us")), blamed,
                    blame.is_object() ? short_duration(integer(blame, "over_us")) : "-", text(job, "worker"),
                    text(job, "attempts"), ago(integer(job, "ended_ms")), text(job, "class")});
  }
  return table(rows);
}

Result<void> slow(const JobFlags& flags) {
  std::string path = "/v1/jobs/slow?limit=" + std::to_string(flags.limit);
  if (!flags.class_key.empty()) path += "&class=" + percent_encoded(flags.class_key);
  return print_answer(flags.target, HttpClient(flags.target).json("GET", path), slow_text);
}

std::string job_text(const json::value& job) {
  std::string out = fmt::format("{}  {}{}\nmodel    {}\nclass    {}\ncreated  {}\nspec     {}\n", text(job, "id"),
                                state_text(job), progress_text(job), text(job, "model"), text(job, "class"),
                                ago(integer(job, "created_ms")), json_text(field(job, "spec")));
  for (const json::value& warning : items(job, "warnings")) out += "warning  " + json::serialize(warning) + "\n";
  if (const std::string why = text(field(job, "error"), "message"); !why.empty()) out += "error    " + why + "\n";
  std::vector<std::vector<std::string>> rows = {{"UNIT", "STATE", "ATTEMPT", "WORKER", "STEP", "RESULT"}};
  for (const json::value& unit : items(job, "unit_records")) {
    const std::string error = text(field(unit, "error"), "message");
    const bool stepped = integer(unit, "total_steps") > 0;  // not kept for a unit that did not succeed
    rows.push_back({text(unit, "unit"), text(unit, "state"), text(unit, "attempt"), text(unit, "worker"),
                    stepped ? text(unit, "step") + "/" + text(unit, "total_steps") +
                                  (text(unit, "phase") == "decoding" ? " decoding" : "")
                            : "",
                    error.empty() ? text(field(unit, "result"), "url") : one_line(error, 200)});
  }
  return rows.size() > 1 ? out + table(rows) : out;
}

Result<void> show(const JobFlags& flags) {
  return print_answer(flags.target, HttpClient(flags.target).json("GET", "/v1/jobs/" + flags.id), job_text);
}

// Succeeds if the job succeeds.
Result<void> watch(const JobFlags& flags) {
  const InterruptGuard guard;
  HttpClient client(flags.target);
  // Watching survives a restart of the service. A service that does not answer the first request is an error.
  const auto job = client.json("GET", "/v1/jobs/" + flags.id);
  if (!job) return job.error();
  JobProgress progress(flags.target.json, integer(*job, "units", 1));
  std::string last;
  auto watched = watch_job(client, flags.id, progress.shown(), [&](const ServerEvent& event) {
    progress.on_event(event);
    if (event.type == "progress") return;
    last = event.type;
    if (flags.target.json) {
      const auto data = parse_json(event.data);
      print(json::object{{"id", event.id}, {"event", event.type}, {"data", data ? *data : json::value(event.data)}});
    } else if (event.type != "step" || !progress.shown()) {
      progress.clear();
      std::printf("%s\n", event_line(event).c_str());
    }
    std::fflush(stdout);
  });
  progress.clear();
  if (!watched) return watched;
  if (last != "succeeded") return Error{Code::kUnavailable, "job " + flags.id + " " + last, {}};
  return {};
}

Result<void> cancel(const JobFlags& flags) {
  return print_answer(flags.target, HttpClient(flags.target).json("DELETE", "/v1/jobs/" + flags.id),
                      [&](const json::value& job) {
                        const std::string state = text(job, "state");
                        return flags.id + " " + state + (state == "canceling" ? "; stops at its next step\n" : "\n");
                      });
}

Result<void> post(const JobFlags& flags, const char* action) {
  return print_answer(flags.target, HttpClient(flags.target).json("POST", "/v1/jobs/" + flags.id + "/" + action),
                      [&](const json::value& job) {
                        const std::string state = text(job, "state");
                        const bool stops = std::string_view(action) == "pause" && state == "running";
                        return flags.id + " " + state + (stops ? "; stops at its next step\n" : "\n");
                      });
}

Result<void> pause(const JobFlags& flags) { return post(flags, "pause"); }
Result<void> resume(const JobFlags& flags) { return post(flags, "resume"); }

}  // namespace

void add_jobs(CLI::App& app, Invocation& run) {
  auto* jobs = app.add_subcommand("jobs", "List, show, watch, pause, resume or cancel jobs; find slow ones");
  jobs->require_subcommand(1);
  const auto add = [&](const char* name, const char* what, Result<void> (*action)(const JobFlags&), bool takes_id) {
    auto flags = std::make_shared<JobFlags>();
    auto* command = jobs->add_subcommand(name, what);
    add_target_flags(*command, flags->target);
    if (takes_id) command->add_option("job", flags->id, "The job's id")->required();
    command->callback([flags, action, name, takes_id, &run] {
      run = [flags, action, name, takes_id] {
        return run_on("jobs " + std::string(name), flags->target, [&] {
          const auto valid = takes_id ? check_job_id(flags->id) : Result<void>();
          return valid ? action(*flags) : valid;
        });
      };
    });
    return std::pair(command, flags);
  };
  const auto add_limit = [](CLI::App* command, JobFlags& flags, int most) {
    command->add_option("--limit", flags.limit, "Maximum number of jobs to list")
        ->check(CLI::Range(1, most))
        ->capture_default_str();
  };
  const auto [list_command, list_flags] = add("list", "List jobs, newest first", list, false);
  list_command->add_option("--state", list_flags->state, "Only jobs in this state");
  add_limit(list_command, *list_flags, 1000);
  list_command->add_option("--cursor", list_flags->cursor, "Continue after a previous list");
  const auto [slow_command, slow_flags] =
      add("slow", "List the slowest jobs of the last hour and the phase to blame", slow, false);
  slow_command->add_option("--class", slow_flags->class_key, "Only jobs of this class");
  add_limit(slow_command, *slow_flags, 200);
  add("show", "Show one job and its units", show, true);
  add("watch", "Print a job's events until it ends", watch, true);
  add("cancel", "Cancel a job; it stops at its next step", cancel, true);
  add("pause", "Pause a job; it stops at its next step and keeps its progress", pause, true);
  add("resume", "Let a paused job go on", resume, true);
}

}  // namespace ditfleet::cli
