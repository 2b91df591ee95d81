// `ditfleet batch FILE`.
#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <thread>

#include "coordinator/cli/command.h"
#include "coordinator/cli/http_client.h"
#include "coordinator/cli/json_fields.h"
#include "coordinator/cli/terminal.h"
#include "shared/core/bytes.h"
#include "shared/core/text.h"
#include "shared/job/output_format.h"

namespace ditfleet::cli {
namespace {

namespace fs = std::filesystem;

struct BatchFlags {
  Target target;
  std::string file, out, idempotency_key;
  bool skip = false, no_wait = false;
};

std::string counts_text(const json::value& batch) {
  const json::value& counts = field(batch, "request_counts");
  std::string text = fmt::format("{} of {} succeeded", integer(counts, "completed"), integer(counts, "total"));
  if (integer(counts, "failed") > 0) text += fmt::format(", {} failed", integer(counts, "failed"));
  if (integer(counts, "canceled") > 0) text += fmt::format(", {} canceled", integer(counts, "canceled"));
  return text;
}

// custom_id, if it is a file's name, else the line's number: "17", "17-2".
std::string name_of(const json::value& row, std::size_t unit, std::size_t units) {
  std::string name = text(row, "custom_id");
  const bool good = !name.empty() && name.size() <= 100 && name.front() != '.' && name.find('/') == std::string::npos &&
                    name.find('\0') == std::string::npos;
  if (!good) name = std::to_string(integer(row, "line"));
  return units > 1 ? name + "-" + std::to_string(unit + 1) : name;
}

Result<void> save(HttpClient& client, const json::value& row, const std::string& folder) {
  const json::value& job = field(field(row, "response"), "body");
  const json::array units = items(job, "unit_records");
  for (std::size_t i = 0; i < units.size(); ++i) {
    auto picture = client.request("GET", "/v1/jobs/" + text(job, "id") + "/results/" + std::to_string(i));
    if (!picture) return picture.error();
    if (picture->status != 200) return error_of(*picture, "the result of " + text(row, "id"));
    const auto format = job::format_from_media_type(picture->content_type);
    const fs::path path =
        fs::path(folder) / (name_of(row, i, units.size()) + std::string(format ? job::row_of(*format).extension : ""));
    if (auto written = write_file_atomically(path.string(), picture->body); !written) return written;
  }
  return {};
}

Result<void> batch(const BatchFlags& flags) {
  std::error_code ec;
  if (!flags.out.empty() && !fs::is_directory(flags.out, ec) && !fs::create_directories(flags.out, ec))
    return invalid_argument("-o is '" + flags.out + "', which is no folder and cannot be created");
  const InterruptGuard guard;
  HttpClient client(flags.target);
  std::vector<std::string> headers;
  if (!flags.idempotency_key.empty()) headers.push_back("Idempotency-Key: " + flags.idempotency_key);
  auto state = client.send_file("POST", flags.skip ? "/v1/batches?on_error=skip" : "/v1/batches", flags.file, headers);
  if (!state) return state.error();
  const std::string id = text(*state, "id");
  if (flags.no_wait) return print_answer(flags.target, state, [&](const json::value&) { return id + "\n"; });
  for (const json::value& bad : items(*state, "errors"))
    std::fprintf(stderr, "line %s: %s\n", text(bad, "line").c_str(), text(bad, "message").c_str());
  ProgressLine progress(flags.target.json);
  while (text(*state, "status") != "completed" && text(*state, "status") != "cancelled") {
    const json::value& part = field(*state, "progress");
    progress.draw(part.is_number() ? part.to_number<double>() : 0, counts_text(*state));
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    state = client.json("GET", "/v1/batches/" + id);
    if (state) continue;
    progress.clear();
    if (state.error().code != Code::kCanceled) return state.error();
    InterruptGuard::clear();
    (void)client.request("POST", "/v1/batches/" + id + "/cancel", {}, std::chrono::seconds(30));
    return Error{Code::kCanceled, "interrupted; batch " + id + " was canceled", {}};
  }
  progress.clear();
  auto results = client.request("GET", "/v1/batches/" + id + "/results", {}, std::chrono::seconds(300));
  if (!results) return results.error();
  if (results->status != 200) return error_of(*results, "the results of " + id);
  std::int64_t failed = 0;
  for (const std::string_view line : split(results->body, '\n')) {
    if (line.empty()) continue;
    const auto row = parse_json(line);
    if (!row) return row.error();
    if (text(*row, "state") != "succeeded") {
      ++failed;
      if (!flags.target.json && text(*row, "state") != "refused")
        std::fprintf(stderr, "line %s (%s) %s: %s\n", text(*row, "line").c_str(), text(*row, "id").c_str(),
                     text(*row, "state").c_str(), text(field(*row, "error"), "message").c_str());
    } else if (!flags.out.empty()) {
      if (auto saved = save(client, *row, flags.out); !saved) return saved;
    }
  }
  if (flags.target.json)
    std::fputs(results->body.c_str(), stdout);
  else
    std::printf("%s: %s\n", id.c_str(), counts_text(*state).c_str());
  if (failed > 0) return Error{Code::kUnavailable, std::to_string(failed) + " lines did not succeed", {}};
  return {};
}

}  // namespace

void add_batch(CLI::App& app, Invocation& run) {
  auto flags = std::make_shared<BatchFlags>();
  auto* command = app.add_subcommand("batch", "Run many jobs from a file of JSON lines");
  command->footer(
      "A line is a job, as POST /v1/jobs takes it, or {\"custom_id\": \"a\", \"body\": the job}:\n"
      "  {\"prompt\": \"a red circle\", \"seed\": 1}\n"
      "Examples:\n"
      "  ditfleet batch prompts.jsonl -o pictures\n"
      "  ditfleet batch prompts.jsonl --skip-errors --no-wait");
  add_target_flags(*command, flags->target);
  command->add_option("file", flags->file, "File of JSON lines")->required()->type_name("FILE");
  command
      ->add_option("-o,--out", flags->out,
                   "Folder for the results: files with the custom_id, or else the number of the line, as name")
      ->type_name("DIR");
  command->add_option("--idempotency-key", flags->idempotency_key, "A repetition with the same key is the same batch")
      ->type_name("KEY");
  command->add_flag("--skip-errors", flags->skip, "Run the others if lines are wrong; without it none runs");
  command->add_flag("--no-wait", flags->no_wait, "Print the batch's id and end");
  command->callback(
      [flags, &run] { run = [flags] { return run_on("batch", flags->target, [&] { return batch(*flags); }); }; });
}

}  // namespace ditfleet::cli
