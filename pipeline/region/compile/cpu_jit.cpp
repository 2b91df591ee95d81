#include "pipeline/region/compile/cpu_jit.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <utility>

#include "shared/core/bytes.h"
#include "shared/core/child_process.h"

namespace ditfleet::region {
namespace {

constexpr std::chrono::seconds kDeadline{60};  // per compilation; half a second is usual

// This process's environment without what changes a compiler's output: language and line width. The output is part of
// keys.
std::vector<std::string> compiler_environment() {
  std::vector<std::string> variables{"LC_ALL=C"};
  for (char** one = environ; *one; ++one) {
    const std::string_view variable(*one);
    if (!variable.starts_with("LC_ALL=") && !variable.starts_with("LANGUAGE=") && !variable.starts_with("COLUMNS="))
      variables.emplace_back(variable);
  }
  return variables;
}

Result<ProgramRun> run_compiler(std::vector<std::string> arguments, std::chrono::seconds limit,
                                const std::string& input = "/dev/null") {
  ProcessSpec spec;
  spec.argv = std::move(arguments);
  spec.environment = compiler_environment();
  spec.input = input;
  return run_program(spec, Deadline::after(limit));
}

// A folder below TMPDIR that is removed with its object.
class ScratchFolder {
 public:
  ScratchFolder() {
    const char* parent = std::getenv("TMPDIR");
    std::string path = std::string(parent && *parent ? parent : "/tmp") + "/ditfleet-region-XXXXXX";
    if (mkdtemp(path.data()))
      path_ = path;
    else
      why_ = "cannot create a folder in " + path.substr(0, path.rfind('/')) + ": " + std::strerror(errno);
  }
  ~ScratchFolder() {
    std::error_code ignored;
    if (ok()) std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  bool ok() const { return !path_.empty(); }
  const std::string& path() const { return path_; }
  const std::string& why() const { return why_; }  // why it could not be created, unless ok()

 private:
  std::string path_, why_;
};

// The processor's model and features from /proc/cpuinfo, one line each; empty if it has none.
std::string processor_features() {
  const auto told = read_file("/proc/cpuinfo");
  std::string features;
  if (!told) return features;
  for (const char* field : {"model name", "flags", "CPU part", "Features"}) {  // x86's, then Arm's
    const auto at = told->find(field);
    if (at != std::string::npos) features += told->substr(at, told->find('\n', at) - at) + "\n";
  }
  return features;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

class CpuJit : public Compiler {
 public:
  CpuJit(std::string program, std::string version, std::string target)
      : program_(std::move(program)), version_(std::move(version)), target_(std::move(target)) {}

  std::string_view name() const override { return "cpu_jit"; }
  kernel_cache::Kind output_kind() const override { return kernel_cache::Kind::kSharedObject; }
  // On a CPU rounding is cheap, and bf16 images then differ from diffusers' only by the order of sums.
  FuseOptions fuse_options() const override { return {.rounds_results = true}; }
  std::string identity() const override { return version_; }
  std::string target(const std::string&) const override { return target_; }
  std::vector<std::string> options(const std::string&) const override {
    // The source calls no functions: no library is linked, and sqrt must be the instruction.
    return {"-std=c++17",           "-O3",   "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math",
            "-fvisibility=default", "-fPIC", "-shared",       "-nostdlib",     "-fno-exceptions", "-fno-rtti",
            "-fno-ident",           "-w"};
  }

  Result<Entry> compile(const std::string& region, const Source& source, const std::string& arch) const override {
    ScratchFolder folder;
    if (!folder.ok()) return unavailable("[cpu_jit] region " + region + ": " + folder.why());
    const std::string input = folder.path() + "/region.cpp", object = folder.path() + "/region.so";
    if (auto written = write_file_atomically(input, source.text); !written) return written.error();
    std::vector<std::string> arguments{program_};
    for (auto& option : options(arch)) arguments.push_back(std::move(option));
    // From stdin, so that the object contains no path.
    arguments.insert(arguments.end(), {"-x", "c++", "-", "-o", object});
    auto run = run_compiler(arguments, kDeadline, input);
    if (!run) return Error{run.error().code, "[cpu_jit] region " + region + ": " + run.error().message, {}};
    auto code = read_file(object);
    if (run->exit_code != 0 || !code) {
      if (run->output.find(std::strerror(ENOSPC)) != std::string::npos)
        return unavailable("[cpu_jit] region " + region + ": " + std::strerror(ENOSPC) + " in " +
                           std::filesystem::path(folder.path()).parent_path().string() + " for " + program_ + ": " +
                           first_error(run->output));
      const std::string kept = keep_source(region, ".cpp", source.text);
      const std::string said = run->output.empty() ? "it printed nothing" : first_error(run->output);
      return internal_error("[cpu_jit] region " + region + ": " + program_ + " ended with " +
                            std::to_string(run->exit_code) + ": " + (run->exit_code == 0 ? "it wrote no file; " : "") +
                            said + (kept.empty() ? "" : "; the source is saved in " + kept));
    }
    Entry compiled{.region = region,
                   .arch = arch,
                   .kind = output_kind(),
                   .code = std::move(code).value(),
                   .source_bytes = source.text.size()};
    for (const KernelLaunch& launch : source.kernels)
      compiled.kernels.push_back(
          {.name = launch.name, .parameter_bytes = {static_cast<std::uint32_t>(launch.argument_words * 8)}});
    return compiled;
  }

 private:
  const std::string program_, version_, target_;
};

// GCC's first line begins with the name it was called by, which is not part of its identity: "c++ (Debian 12.2.0-14)
// 12.2.0".
std::string version_of(const std::string& program, const std::string& output) {
  const std::string line = first_line(output), name = std::filesystem::path(program).filename().string();
  return line.rfind(name + " (", 0) == 0 ? line.substr(name.size() + 1) : line;
}

Result<std::shared_ptr<const Compiler>> open(const std::string& program) {
  const auto missing = [&](const std::string& why) {
    return unavailable(
        "[cpu_jit] " + program + " cannot be used: " + why +
        "; install g++ (or name a C++ compiler with compile.cxx or DITFLEET_CXX), or use the backend eager");
  };
  auto version = run_compiler({program, "--version"}, std::chrono::seconds(10));
  if (!version) return missing(version.error().message);
  if (version->exit_code != 0)
    return missing("--version ended with " + std::to_string(version->exit_code) + ": " + first_error(version->output));
  if (version->output.empty()) return missing("--version prints nothing");
  // What -march=native means here: GCC prints every option it resolves to. Without -o it would want a file in TMPDIR,
  // to write nothing to it.
  auto target = run_compiler({program, "-march=native", "-Q", "--help=target", "-S", "-o", "/dev/null"},
                             std::chrono::seconds(10));
  std::string features = target && target->exit_code == 0 ? target->output : std::string();
  if (features.empty()) {  // Clang: the processor's own list
    features = processor_features();
    if (features.empty()) return missing("the processor's features are unknown (/proc/cpuinfo)");
  }
  return std::shared_ptr<const Compiler>(
      std::make_shared<CpuJit>(program, version_of(program, version->output),
                               std::string(kHostArch) + " " + sha256_hex(features).substr(0, 32)));
}

}  // namespace

Result<std::shared_ptr<const Compiler>> open_cpu_jit(const std::string& given) {
  static std::mutex mutex;
  static std::shared_ptr<const Compiler> opened;
  static std::string opened_for;
  const char* named = std::getenv("DITFLEET_CXX");
  const std::string program = !given.empty() ? given : named && *named ? named : "c++";
  std::lock_guard lock(mutex);
  if (opened && opened_for == program) return opened;
  auto made = open(program);
  if (!made) return made;
  opened = *made;
  opened_for = program;
  return opened;
}

}  // namespace ditfleet::region
