#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <memory>
#include <sstream>

#include "pipeline/engine.h"
#include "shared/core/json.h"
#include "shared/kernel_cache/open.h"
#include "worker/commands/command_line.h"
#include "worker/commands/engine_options.h"
#include "worker/families.h"

namespace ditfleet::worker {
namespace {

struct CompileFlags {
  config::Sources sources;
  std::string model_dir;
  WeightFlags weights;
  std::string architectures;  // "sm_80,sm_90a"; empty: all GPUs
  std::string dtype = "auto";
  bool explain = false, json = false;
};

constexpr const char* kAllGpus = "sm_80,sm_86,sm_89,sm_90a,sm_100a,sm_120a";

// Splits at commas, removes surrounding blanks and drops repeated words.
std::vector<std::string> split(const std::string& list) {
  constexpr const char* kBlanks = " \t\r\n";
  std::vector<std::string> words;
  std::istringstream in(list);
  for (std::string part; std::getline(in, part, ',');) {
    const auto first = part.find_first_not_of(kBlanks);
    const std::string word =
        first == std::string::npos ? "" : part.substr(first, part.find_last_not_of(kBlanks) + 1 - first);
    if (std::find(words.begin(), words.end(), word) == words.end()) words.push_back(word);
  }
  return words;
}

// Fails if workers with these options would not use any program.
Result<void> check_compile(const region::CompileOptions& options) {
  const auto nothing = [](const std::string& field, const std::string& why) {
    return invalid_argument("nothing can be compiled ahead of time with " + field + ": " + why,
                            field.substr(0, field.find('=')));
  };
  if (options.backend == "eager") return nothing("compile.backend=eager", "workers that run eagerly use no programs");
  if (!options.transformer && !options.vae.value_or(true))
    return nothing("compile.components.transformer=false and compile.components.vae=false",
                   "workers compile no other component");
  return {};
}

// Checks that every program is stored outside this process, since programs in memory only would be lost.
Result<void> check_kept(const region::AheadReport& report, kernel_cache::CacheOptions options) {
  options.memory_bytes = 0;
  const std::string dir = options.dir;
  const auto outside = kernel_cache::KernelCache::create(std::move(options));
  std::size_t lost = 0;
  std::string why;
  for (const auto& made : report.regions) {
    const auto found = outside->find(made.key, made.arch);
    if (found) continue;
    ++lost;
    why = found.error().message;
  }
  if (lost == 0) return {};
  return unavailable(
      std::to_string(lost) + " of " + std::to_string(report.regions.size()) +
      " programs were compiled but could not be stored (" + why +
      "): " + (dir.empty() ? "no cache folder is configured" : "check that '" + dir + "' is writable and has space") +
      "; set cache.dir to another folder, or set redis.url and cache.secret to store them in Redis");
}

json::object to_json(const region::AheadRegion& made, bool explain) {
  json::object out{{"name", made.name},
                   {"arch", made.arch},
                   {"kernels", made.program->kernels.size()},
                   {"registers", made.registers()},
                   {"spills", made.spill_bytes()},
                   {"source_bytes", made.program->source_bytes},
                   {"cubin_bytes", made.program->code.size()},
                   {"dtype", made.element_type},
                   {"key", made.key.hex()},
                   {"compiled", made.compiled},
                   {"ms", static_cast<double>(made.compile_us) / 1000}};
  if (explain) out["explain"] = made.explanation;
  return out;
}

Result<void> run(const CompileFlags& flags) {
  auto settings = settings_of(flags.sources);
  if (!settings) return settings.error();
  const auto architectures = split(flags.architectures.empty() ? kAllGpus : flags.architectures);
  const auto wanted = compile_options(*settings);
  if (auto checked = check_compile(wanted); !checked) return checked;
  auto options = kernel_cache::cache_options(*settings);
  if (!options) return options.error();
  auto quantize = config::parse_quantize(flags.weights.quantize);
  if (!quantize) return quantize.error();
  auto cache = kernel_cache::KernelCache::create(*options);
  auto report = pipeline::Engine::compile_regions(
      families(), {"model", flags.model_dir, flags.weights.files, *quantize, {}, flags.weights.attention}, flags.dtype,
      architectures, *cache, wanted);
  if (!report) {
    if (report.error().param == "arch") return invalid_argument("--arch: " + report.error().message);
    return report.error();
  }
  if (!report->eager.empty()) {
    const std::string why =
        "nothing is compiled for cpu in bf16 with compile.backend=auto, because workers with these settings run "
        "eagerly "
        "there (bit-identical to diffusers); set compile.backend=cpu_jit or compile.fullgraph=true here and for the "
        "workers, or use fp32 (--dtype), to run compiled programs";
    if (report->regions.empty()) return invalid_argument(why, "compile.backend");
    spdlog::warn("{}", why);
  }
  if (report->regions.empty())
    return invalid_argument("nothing to compile for '" + flags.architectures +
                                "' with compile.components.transformer=false, because the VAE runs eagerly on a CPU",
                            "compile.components.transformer");
  cache->flush();
  if (auto kept = check_kept(*report, *options); !kept) return kept;
  for (const auto& line : region::spill_warnings(*report)) spdlog::warn("{}", line);
  if (flags.json) {
    json::array regions;
    for (const auto& made : report->regions) regions.push_back(to_json(made, flags.explain));
    std::cout << json::serialize(json::object{
                     {"regions", std::move(regions)}, {"compiled", report->compiled}, {"hits", report->hits}})
              << std::endl;
  } else {
    for (const auto& made : report->regions) {
      char line[160];
      std::snprintf(line, sizeof line,
                    "%-12s %-8s %-5s %3zu kernels  %3u registers  %u spilled  %7zu bytes  %8.1f ms  %s\n",
                    made.name.c_str(), made.arch.c_str(), made.element_type.c_str(), made.program->kernels.size(),
                    made.registers(), made.spill_bytes(), made.program->code.size(),
                    static_cast<double>(made.compile_us) / 1000, made.compiled ? "compiled" : "from the cache");
      std::cout << line;
      if (flags.explain) std::cout << made.explanation;
    }
    std::cout << report->compiled << " compiled, " << report->hits << " already in the cache\n";
  }
  if (!std::cout) return internal_error("cannot write to standard output");
  return {};
}

}  // namespace

void add_compile(CLI::App& app, Invocation& invoked) {
  auto& command = *app.add_subcommand("compile", "Compile the regions of a model ahead of time");
  const auto kept = std::make_shared<CompileFlags>();
  CompileFlags& flags = *kept;
  add_model_folder(command, flags.model_dir);
  add_weight_flags(command, flags.weights);
  command
      .add_option("--arch", flags.architectures,
                  std::string("Architectures, separated by commas; cpu means this processor. Default: ") + kAllGpus)
      ->type_name("LIST");
  command
      .add_option(
          "--dtype", flags.dtype,
          "Precision of the workers: auto (bf16 for GPUs, fp32 for cpu), fp32 or bf16; cpu in bf16 runs eagerly "
          "unless compile.backend is cpu_jit")
      ->type_name("DTYPE");
  command.add_flag("--explain", flags.explain,
                   "Print the fused steps, and the registers, spills and bytes moved of each kernel");
  command.add_flag("--json", flags.json, "Print JSON");
  add_configuration_flags(command, flags.sources);
  command.footer(
      "Fills the kernel cache (cache.*) under the keys that a worker on such a GPU looks up. Needs no GPU.\n"
      "Programs for GPUs need NVRTC (deploy/setup.sh installs it); programs for cpu need a C++ compiler.\n"
      "Use the compile.* settings of the workers: they select the components that have programs.");
  command.callback([kept, &invoked] { invoked = [kept] { return report("compile", run(*kept)); }; });
}

}  // namespace ditfleet::worker
