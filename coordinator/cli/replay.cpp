// `ditfleet replay JOB`: draws a job again and compares the results.
#include <cstdio>

#include "coordinator/cli/command.h"
#include "coordinator/cli/http_client.h"
#include "coordinator/cli/job_watch.h"
#include "coordinator/cli/json_fields.h"
#include "coordinator/cli/terminal.h"

namespace ditfleet::cli {
namespace {

struct ReplayFlags {
  Target target;
  std::string id;
};

// The parts of two receipts that differ: "device 'A', now 'B'".
std::string difference(const json::value& before, const json::value& now) {
  if (!before.is_object() || !now.is_object()) return "a receipt is missing";
  std::string out;
  for (const auto& [name, value] : before.get_object()) {
    const json::value& other = field(now, name);
    if (name == "id" || value == other) continue;
    out += (out.empty() ? "" : "; ") + std::string(name) + " " + json::serialize(value) + ", now " +
           json::serialize(other);
  }
  return out.empty() ? "the receipts are equal; they promise the same bytes " + text(now, "same_bytes") : out;
}

Result<void> replay(const ReplayFlags& flags) {
  if (auto good = check_job_id(flags.id); !good) return good;
  const InterruptGuard guard;
  HttpClient client(flags.target);
  const auto before = client.json("GET", "/v1/jobs/" + flags.id);
  if (!before) return before.error();
  if (text(*before, "state") != "succeeded")
    return invalid_argument("job " + flags.id + " is " + text(*before, "state") + "; only results can be compared");
  json::object spec = field(*before, "spec").is_object() ? field(*before, "spec").get_object() : json::object();
  for (const char* other : {"priority", "deadline_ms", "webhook", "user", "remixed_from", "pause_after_steps"})
    spec.erase(other);
  const auto submitted = client.json("POST", "/v1/jobs", json::serialize(spec));
  if (!submitted) return submitted.error();
  const std::string id = text(*submitted, "id");
  const auto now = await_own_job(client, *submitted, flags.target.json);
  if (!now) return now.error();
  if (text(*now, "state") != "succeeded")
    return Error{Code::kUnavailable,
                 "job " + id + " is " + text(*now, "state") + "; see `ditfleet explain " + id + "`"};
  const json::array &was = items(*before, "unit_records"), &is = items(*now, "unit_records");
  json::array rows;
  std::size_t equal = 0;
  for (std::size_t i = 0; i < was.size() && i < is.size(); ++i) {
    const json::value &old_result = field(was[i], "result"), &new_result = field(is[i], "result");
    const bool same = text(old_result, "sha256") == text(new_result, "sha256");
    equal += same;
    const std::string why = same ? "" : difference(field(old_result, "receipt"), field(new_result, "receipt"));
    rows.push_back(json::object{{"unit", i}, {"same_bytes", same}, {"difference", why}});
    if (!flags.target.json) std::printf("unit %zu: %s\n", i, same ? "the same bytes" : ("other bytes: " + why).c_str());
  }
  if (flags.target.json) print(json::object{{"job", flags.id}, {"replay", id}, {"units", std::move(rows)}});
  if (equal == was.size()) return {};
  return Error{Code::kUnavailable, std::to_string(was.size() - equal) + " of " + std::to_string(was.size()) +
                                       " results of " + flags.id + " differ from those of " + id};
}

}  // namespace

void add_replay(CLI::App& app, Invocation& run) {
  auto flags = std::make_shared<ReplayFlags>();
  auto* command = app.add_subcommand("replay", "Run a job again and compare the bytes of its results");
  command->footer(
      "Results have the same bytes if their receipts are equal; if they differ, the command says in what.\n"
      "  ditfleet replay JOB");
  add_target_flags(*command, flags->target);
  command->add_option("id", flags->id, "The job")->required()->type_name("JOB");
  command->callback(
      [flags, &run] { run = [flags] { return run_on("replay", flags->target, [&] { return replay(*flags); }); }; });
}

}  // namespace ditfleet::cli
