// `ditfleet models add`: writes a model's entry into the configuration file.
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "coordinator/cli/command.h"
#include "coordinator/cli/json_fields.h"
#include "shared/config/edit.h"
#include "shared/config/model_path.h"
#include "shared/core/bytes.h"
#include "shared/core/child_process.h"
#include "shared/core/fd_io.h"
#include "shared/core/output_file.h"
#include "shared/core/text.h"
#include "shared/core/unique_fd.h"
#include "shared/families/served.h"

namespace ditfleet::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::minutes kLongestRun{10};  // of ditfleet-worker; folders may be on a slow network

struct ModelsFlags {
  config::Sources sources;
  std::string name, quantize;
  std::vector<std::string> parts;  // FOLDER, FILE or COMPONENT=FILE
  bool replace = false, json = false;
};

// A file of weights, and the component that it was given for; empty: what it is decides.
struct WeightFile {
  std::string path, component;
};

struct Parts {
  std::string folder;
  std::vector<WeightFile> files;
};

Result<ProgramRun> run_worker(std::vector<std::string> words, int inherited_fd = -1) {
  const auto program = worker_program();
  if (!program) return program.error();
  words.insert(words.begin(), *program);
  return run_program({.argv = std::move(words), .inherited_fd = inherited_fd}, Deadline::after(kLongestRun));
}

// Which part is the folder, and which are files, with absolute paths.
Result<Parts> parts_of(const std::vector<std::string>& given) {
  Parts parts;
  for (const std::string& text : given) {
    WeightFile file{text, ""};
    for (const std::string component : config::kFileComponents)
      if (text.starts_with(component + "=")) file = {text.substr(component.size() + 1), component};
    const auto found = config::model_path(file.path);
    if (!found) return found.error();
    std::error_code ec;
    file.path = fs::absolute(*found, ec).lexically_normal().string();
    if (!fs::exists(file.path, ec)) return not_found("'" + file.path + "' does not exist");
    if (!fs::is_directory(file.path, ec)) {
      parts.files.push_back(std::move(file));
    } else if (!file.component.empty()) {
      return invalid_argument("'" + text + "' is a folder; " + file.component + " must be a safetensors or GGUF file");
    } else if (!parts.folder.empty()) {
      return invalid_argument("'" + parts.folder + "' and '" + file.path + "' are both folders; give one model folder");
    } else {
      parts.folder = std::move(file.path);
    }
  }
  return parts;
}

// The JSON objects among the lines, some of which may be warnings of libraries.
std::vector<json::value> objects_of(const std::string& output) {
  std::vector<json::value> objects;
  for (const auto line : split(output, '\n'))
    if (auto object = parse_json(line); object && object->is_object()) objects.push_back(std::move(*object));
  return objects;
}

// "transformer" or "transformer_2": files of both have the same content, so the folder decides, or the file's name.
Result<std::string> expert_of(const std::string& folder, const WeightFile& file) {
  std::error_code ec;
  if (!fs::exists(fs::path(folder) / "transformer_2", ec)) return std::string("transformer");
  std::string name = fs::path(file.path).filename().string();
  std::erase_if(name, [](char c) { return c == '-' || c == '_' || c == ' '; });
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  const bool high = name.find("highnoise") != name.npos, low = name.find("lownoise") != name.npos;
  if (high != low) return std::string(high ? "transformer" : "transformer_2");
  return invalid_argument("'" + file.path +
                          "' may be either transformer of this model; write transformer=FILE for high "
                          "noise levels, and transformer_2=FILE for low ones");
}

// Adds the file's components to `files`, by key of the configuration.
Result<void> assign(const WeightFile& file, const json::value& report, const std::string& kind,
                    const std::string& folder, std::map<std::string, std::string>& files) {
  const std::string quoted = "'" + file.path + "'";
  if (const std::string problem = text(report, "problem"); !problem.empty())
    return invalid_argument(quoted + " cannot be used: " + problem);
  if (!items(report, "adapter_of").empty())
    return invalid_argument(quoted + " is an adapter; `ditfleet loras add` registers it once the service runs");
  std::string content;
  bool found = false;
  const auto& components = items(report, "components");
  const auto fits = [&](const json::value& part) { return text(part, "family") == kind; };
  const bool any_fits = std::any_of(components.begin(), components.end(), fits);  // others are for other families
  for (const json::value& part : components) {
    if (any_fits && !fits(part)) continue;
    content += (content.empty() ? "" : "; ") + text(part, "text");
    const auto keys = strings_of(field(part, "keys"));
    if (!file.component.empty() && std::find(keys.begin(), keys.end(), file.component) == keys.end()) continue;
    if (!fits(part))
      return invalid_argument(fmt::format("{} is a part of a {} model ({}), but {} has a {} model", quoted,
                                          text(part, "family"), text(part, "text"), folder, kind));
    std::string key = file.component.empty() ? keys.at(0) : file.component;
    if (file.component.empty() && keys.size() > 1) {
      auto expert = expert_of(folder, file);
      if (!expert) return expert.error();
      key = std::move(*expert);
    }
    found = true;
    if (const auto [other, added] = files.emplace(key, file.path); !added)
      return invalid_argument(fmt::format(
          "{0} is given twice: '{1}' and {2}; leave one out, or write COMPONENT=FILE to take one component of a file",
          key, other->second, quoted));
  }
  if (!found) return invalid_argument(quoted + " has no " + file.component + "; it is: " + content);
  return {};
}

// "known:NAME" if files have parts of a known model; else empty. Two such files may make another model.
std::string known_model(const std::vector<json::value>& reports) {
  std::vector<std::vector<std::string>> found;
  for (const json::value& report : reports)
    for (const json::value& part : items(report, "components"))
      if (auto known = strings_of(field(part, "known")); !known.empty()) found.push_back(std::move(known));
  return found.empty() ? std::string() : "known:" + found[0][std::min(found.size(), found[0].size()) - 1];
}

Result<config::ModelSetting> setting_of(const ModelsFlags& flags) {
  if (auto named = config::check_model_name(flags.name); !named) return named.error();
  auto quantize = config::parse_quantize(flags.quantize);
  if (!quantize) return quantize.error();
  const auto parts = parts_of(flags.parts);
  if (!parts) return parts.error();
  std::vector<json::value> reports;
  if (!parts->files.empty()) {
    std::vector<std::string> words{"inspect", "--json"};
    for (const WeightFile& file : parts->files) words.push_back(file.path);
    const auto run = run_worker(std::move(words));
    if (!run) return run.error();
    reports = objects_of(run->output);
    if (reports.size() != parts->files.size()) return internal_error("ditfleet-worker inspect failed: " + run->output);
  }
  config::ModelSetting model{.path = parts->folder, .quantize = std::move(*quantize)};
  if (model.path.empty()) model.path = known_model(reports);
  if (model.path.empty())
    return invalid_argument(
        "a model folder is missing: files of weights have no tokenizers and no scheduler, and none of them is the "
        "transformer of a known model; give a folder in diffusers' layout or hf:ORG/NAME before them, whose weights "
        "they replace");
  const auto folder = config::model_path(model.path);
  if (!folder) return folder.error();
  const auto entry = families::read_model_entry(flags.name, *folder, families::served());
  if (!entry) return entry.error();
  for (std::size_t i = 0; i < reports.size(); ++i)
    if (auto done = assign(parts->files[i], reports[i], entry->kind, *folder, model.files); !done) return done.error();
  return model;
}

// What `ditfleet-worker plan` prints for the model on the configured device. It compares the parts with each other.
Result<std::string> plan_of(const ModelsFlags& flags, const config::Settings& settings) {
  const UniqueFd file(::memfd_create("configuration", MFD_CLOEXEC));
  if (!file.valid() || !write_all(file.get(), config::to_yaml(settings, true)))
    return unavailable(std::string("cannot create a file in memory: ") + std::strerror(errno));
  const config::ModelSetting& model = settings.models.at(flags.name);
  std::vector<std::string> words{"plan", "--model", model.path, "--config",
                                 "/proc/self/fd/" + std::to_string(file.get())};
  // Without a cache: the command may run as another user than the service, and need not reach Redis.
  for (const char* set : {"cache.redis=false", "cache.disk_bytes=0", "log.level=error"})
    words.insert(words.end(), {"--set", set});
  for (const auto& [component, path] : model.files) {
    std::string flag = "--" + component;
    std::replace(flag.begin(), flag.end(), '_', '-');
    words.insert(words.end(), {flag, path});
  }
  if (!flags.quantize.empty()) words.insert(words.end(), {"--quantize", flags.quantize});
  if (flags.json) words.emplace_back("--json");
  auto run = run_worker(std::move(words), file.get());
  if (!run) return run.error();
  if (run->exit_code == 0) return std::move(run->output);
  constexpr std::string_view kPrefix = "ditfleet-worker plan: ";
  const auto begin = run->output.rfind(kPrefix);
  std::string why = begin == run->output.npos ? run->output : run->output.substr(begin + kPrefix.size());
  why = why.substr(0, why.find_last_not_of('\n') + 1);
  return Error{run->exit_code == kExitUsage ? Code::kInvalidArgument : Code::kUnavailable, std::move(why)};
}

Result<void> add(const ModelsFlags& flags) {
  const std::string& file = flags.sources.file;
  if (file.empty())
    return invalid_argument(
        "no configuration file is given; pass --config FILE, or set DITFLEET_CONFIG; a file that "
        "does not exist is created");
  const auto old = read_file(file);
  if (!old && old.error().code != Code::kNotFound) return old.error();
  if (old && ::access(file.c_str(), W_OK) != 0)
    return unavailable("cannot write '" + file + "': " + std::strerror(errno));
  const auto model = setting_of(flags);
  if (!model) return model.error();
  auto text = config::with_model(old ? *old : "", file, flags.name, *model, flags.replace);
  if (!text) return text.error();

  config::Sources sources = flags.sources;
  sources.text = *text;
  const ConfigurationCheck check = check_configuration(sources);
  if (!check.problems.empty()) {
    return Error{check.exit_code == kExitUsage ? Code::kInvalidArgument : Code::kNotFound,
                 fmt::format("nothing is written, because the configuration would not be valid:\n{}",
                             fmt::join(check.problems, "\n"))};
  }
  const auto plan = plan_of(flags, *check.settings);
  if (!plan) return plan.error();
  if (const auto now = read_file(file); now.ok() != old.ok() || (now && *now != *old))
    return Error{Code::kConflict, file + " was changed meanwhile; nothing is written, run the command again"};
  if (auto written = write_output_file(file, *text, /*keep_mode=*/true); !written) return written;

  if (flags.json) {
    json::object entry{{"path", model->path}};
    for (const auto& [component, path] : model->files) entry[component] = path;
    if (!flags.quantize.empty()) entry["quantize"] = flags.quantize;
    auto plans = objects_of(*plan);
    print(json::object{{"config", file},
                       {"name", flags.name},
                       {"entry", std::move(entry)},
                       {"plan", plans.empty() ? json::value() : std::move(plans.back())}});
    return {};
  }
  fmt::print(
      "wrote model '{0}' to {1}:\n\n{2}\n{3}\n"
      "Restart the coordinator and the workers that use this file, or start them:\n"
      "  ditfleet up --config {1}\n"
      "Then try the model:\n"
      "  ditfleet generate --model {0} \"a red circle\"\n",
      flags.name, file, config::model_yaml(flags.name, *model), *plan);
  return {};
}

}  // namespace

void add_models(CLI::App& app, Invocation& run) {
  auto* models = app.add_subcommand("models", "Add models to the configuration");
  models->require_subcommand(1);
  auto* command = models->add_subcommand("add", "Check a model's parts and write its entry into the configuration");
  auto flags = std::make_shared<ModelsFlags>();
  command->add_option("name", flags->name, "The model's name in requests")->required()->type_name("NAME");
  command
      ->add_option("parts", flags->parts,
                   "A model folder in diffusers' layout, hf:ORG/NAME[@REVISION] or known:NAME, and files that replace "
                   "the weights of its components: safetensors or GGUF. Their content says which component they are; "
                   "COMPONENT=FILE names it. Without a folder, the files must be those of a known model")
      ->required()
      ->type_name("FOLDER [FILE…]");
  command->add_option("--quantize", flags->quantize, "Quantize components while they are loaded (models.NAME.quantize)")
      ->type_name("COMPONENT=FORMAT,… | auto");
  command->add_flag("--replace", flags->replace, "Replace the entry if the name is taken");
  command->add_flag("--json", flags->json, "Print JSON");
  add_configuration_flags(*command, flags->sources);
  command->footer(
      "Downloads nothing. Writes to the file of --config or DITFLEET_CONFIG, or creates it. If a part is missing or "
      "does "
      "not fit,\nnothing is written. --set and the environment count for the checks and are not written.");
  command->callback([flags, &run] {
    run = [flags] {
      const auto done = add(*flags);
      return done ? kExitOk : report("models add", done.error());
    };
  });
}

}  // namespace ditfleet::cli
