// `ditfleet workers {list,drain,resume,stop}`.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "coordinator/cli/command.h"
#include "coordinator/cli/http_client.h"
#include "coordinator/cli/json_fields.h"
#include "coordinator/cli/terminal.h"

namespace ditfleet::cli {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPoll{250};

struct WorkerFlags {
  std::vector<std::string> names;
  bool wait = false;
  int timeout_s = 600;
};

// "?" while no coordinator leads. A silent worker may never be empty.
std::string empty_in(const json::value& worker) {
  if (text(worker, "state") == "silent") return "–";
  return field(worker, "empty_in_ms").is_number() ? whole_seconds(integer(worker, "empty_in_ms")) : "?";
}

// The models whose sizes are limited by memory, with the largest number of pixels: "one 1.6 MP,other 29.4 MP".
std::string limits_text(const json::value& worker) {
  std::string out;
  const auto* memory = field(worker, "memory").if_object();
  for (const auto& [model, one] : memory == nullptr ? json::object() : *memory) {
    std::int64_t most = 0;
    for (const json::value& limit : items(one, "limits")) most = std::max(most, integer(limit, "max_pixels"));
    if (most > 0)
      out +=
          fmt::format("{}{} {:.1f} MP", out.empty() ? "" : ",", std::string(model), 1e-6 * static_cast<double>(most));
  }
  return out.empty() ? "-" : out;
}

std::string workers_table(const json::value& answer) {
  std::vector<std::vector<std::string>> rows = {
      {"NAME", "PID", "STATE", "DEVICE", "DTYPE", "MODELS", "LARGEST", "LORAS", "JOBS", "SPEED", "EMPTY IN", "SEEN"}};
  for (const json::value& worker : items(answer, "workers")) {
    // Used slots / slots, + adapters in host memory only.
    std::string loras = "-";
    if (const auto slots = integer(worker, "adapter_slots"); slots > 0) {
      const auto taken = items(worker, "adapters").size(), in_host = items(worker, "host_adapters").size();
      loras = std::to_string(taken) + "/" + std::to_string(slots) +
              (in_host > taken ? "+" + std::to_string(in_host - taken) : "");
    }
    const auto gpus = integer(worker, "gpus");
    const json::value& speed = field(worker, "speed");
    rows.push_back({text(worker, "name"), text(worker, "pid"), text(worker, "state"),
                    (gpus > 1 ? std::to_string(gpus) + " × " : "") + text(worker, "device"), text(worker, "precision"),
                    names(worker, "models", ""), limits_text(worker), loras, names(worker, "jobs", "-"),
                    speed.is_number() ? fmt::format("{:.2f}", speed.to_number<double>()) : "-", empty_in(worker),
                    ago(integer(worker, "heartbeat_ms"))});
  }
  return table(rows);
}

// Waits until none of the runs (by run id) has a unit or may still get one. `until_gone`: until none is registered.
Result<void> wait_until_done(HttpClient& client, const WorkerFlags& flags, const std::vector<std::string>& runs,
                             bool until_gone) {
  const auto limit = steady_clock::now() + std::chrono::seconds(flags.timeout_s);
  for (;; std::this_thread::sleep_for(kPoll)) {
    const auto answer = client.json("GET", "/v1/workers");
    if (!answer) {
      if (answer.error().code != Code::kUnavailable || steady_clock::now() > limit) return answer.error();
      continue;  // the gateway or Redis restarts
    }
    std::vector<std::string> left;
    for (const json::value& worker : items(*answer, "workers")) {
      if (std::find(runs.begin(), runs.end(), text(worker, "boot")) == runs.end()) continue;
      if (until_gone || text(worker, "state") != "draining" || integer(worker, "busy_units") > 0)
        left.push_back(text(worker, "name"));
    }
    if (left.empty()) return {};
    if (steady_clock::now() > limit) {
      return Error{Code::kDeadlineExceeded,
                   fmt::format("not {} within {} s: {}; raise --timeout, or look at `ditfleet workers list`",
                               until_gone ? "stopped" : "empty", flags.timeout_s, fmt::join(left, ", ")),
                   {}};
    }
  }
}

Result<void> change(const std::string& action, const Target& target, const WorkerFlags& flags) {
  HttpClient client(target);
  json::array workers;
  std::vector<std::string> runs;
  for (const std::string& name : flags.names) {
    auto answer = client.json("POST", "/v1/workers/" + percent_encoded(name) + "/" + action);
    if (!answer) return answer.error();
    runs.push_back(text(*answer, "boot"));
    workers.push_back(std::move(*answer));
  }
  if (flags.wait) {
    if (auto done = wait_until_done(client, flags, runs, action == "stop"); !done) return done;
  }
  return print_answer(target, json::value(json::object{{"workers", std::move(workers)}}),
                      [&](const json::value& answer) {
                        std::string out;
                        for (const json::value& worker : items(answer, "workers")) {
                          out += text(worker, "name") + ": ";
                          const std::string left = empty_in(worker);
                          out += flags.wait                          ? (action == "stop" ? "stopped\n" : "empty\n")
                                 : action == "resume"                ? "takes units again\n"
                                 : text(worker, "state") == "silent" ? "silent; it drains once it answers\n"
                                 : left == "now"                     ? "empty now\n"
                                                                     : "empty in about " + left + "\n";
                        }
                        return out;
                      });
}

}  // namespace

void add_workers(CLI::App& app, Invocation& run) {
  auto target = std::make_shared<Target>();
  auto* workers = app.add_subcommand("workers", "List, drain, resume or stop workers; without a command, list them");
  add_target_flags(*workers, *target);
  workers->callback([workers, target, &run] {
    if (!workers->get_subcommands().empty() && workers->get_subcommands().front()->get_name() != "list") return;
    run = [target] {
      return run_on("workers", *target, [&] {
        return print_answer(*target, HttpClient(*target).json("GET", "/v1/workers"), workers_table);
      });
    };
  });
  const auto add = [&](const std::string& action, const char* what) {
    // Two commands with the same flags would both read them from the environment.
    auto* command = workers->add_subcommand(action, what)->fallthrough();
    command->footer("The flags of `ditfleet workers`, such as --url, --key and --json, may follow, too.");
    if (action == "list") return;
    auto flags = std::make_shared<WorkerFlags>();
    command->add_option("name", flags->names, "Names of the workers")->required();
    if (action != "resume") {
      command->add_flag("--wait", flags->wait,
                        action == "stop" ? "Wait until they have ended" : "Wait until they are empty");
      command->add_option("--timeout", flags->timeout_s, "Longest wait in seconds")
          ->check(CLI::Range(1, 86'400))
          ->capture_default_str();
    }
    command->callback([target, flags, action, &run] {
      run = [target, flags, action] {
        return run_on("workers " + action, *target, [&] { return change(action, *target, *flags); });
      };
    });
  };
  add("list", "List live workers with their models, units and adapters");
  add("drain", "Let workers finish their running units and take no others until they are resumed");
  add("resume", "Let drained workers take units again");
  add("stop", "Drain workers and end their processes");
}

}  // namespace ditfleet::cli
