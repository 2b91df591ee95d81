#include "pipeline/region/compile/nvrtc.h"

#include <algorithm>
#include <charconv>

#include "pipeline/region/compile/nvrtc_library.h"

namespace ditfleet::region {
namespace {

// The number before `unit` in "… N unit"; 0 if there is none.
std::uint32_t number_before(std::string_view text, std::string_view unit) {
  const auto at = text.find(unit);
  if (at == std::string_view::npos) return 0;
  std::size_t end = at;
  while (end > 0 && text[end - 1] == ' ') --end;
  std::size_t begin = end;
  while (begin > 0 && text[begin - 1] >= '0' && text[begin - 1] <= '9') --begin;
  std::uint32_t value = 0;
  std::from_chars(text.data() + begin, text.data() + end, value);
  return value;
}

class Nvrtc : public Compiler {
 public:
  explicit Nvrtc(const NvrtcLibrary& library) : nvrtc_(library) {}

  std::string_view name() const override { return "nvrtc"; }
  kernel_cache::Kind output_kind() const override { return kernel_cache::Kind::kCubin; }
  FuseOptions fuse_options() const override {
    return {.gelu_in_gemm = true, .attention_token_stride = true, .copies_in_rows = true};
  }
  std::string identity() const override {
    int major = 0, minor = 0;
    nvrtc_.version(&major, &minor);
    return "nvrtc " + std::to_string(major) + "." + std::to_string(minor) + " " + nvrtc_.build_id;
  }
  std::string target(const std::string& arch) const override { return arch; }
  std::vector<std::string> options(const std::string& arch) const override {
    // NVRTC's own cache would return a cubin without its log, and bypass the kernel cache.
    std::vector<std::string> options{"--gpu-architecture=" + arch, "--std=c++17", "--no-cache", "--ptxas-options=-v"};
    // Split compilation uses all cores. Up to Hopper their number does not change the cubin. For Blackwell the cubin of
    // a split compilation depends on memory addresses of the process, registers and spills included.
    if (!arch.starts_with("sm_1")) options.insert(options.begin() + 2, "--split-compile=0");
    return options;
  }

  Result<Entry> compile(const std::string& region, const Source& source, const std::string& arch) const override {
    auto compiled = attempt(region, source, arch, {});
    if (!compiled) return compiled;
    // Spills depend on source and compiler only, so this option need not be part of the key.
    std::vector<std::string> more;
    for (const KernelLaunch& launch : source.kernels)
      for (const KernelInfo& kernel : compiled->kernels)
        if (launch.variants && kernel.spill_bytes > 0 && kernel.name == function_names(launch).front())
          more.push_back(all_registers_option(launch));
    if (more.empty()) return compiled;
    auto again = attempt(region, source, arch, more);
    return again && spilled(*again) < spilled(*compiled) ? again : compiled;
  }

 private:
  static std::uint64_t spilled(const Entry& entry) {
    std::uint64_t bytes = 0;
    for (const KernelInfo& kernel : entry.kernels) bytes += kernel.spill_bytes;
    return bytes;
  }

  Result<Entry> attempt(const std::string& region, const Source& source, const std::string& arch,
                        const std::vector<std::string>& more) const {
    NvrtcLibrary::Program program = nullptr;
    const int result = nvrtc_.create(&program, source.text.c_str(), (region + ".cu").c_str(), 0, nullptr, nullptr);
    if (result != 0)
      return internal_error("[nvrtc] cannot create a program: " + std::string(nvrtc_.error_text(result)));
    auto compiled = run(program, region, source, arch, more);
    nvrtc_.destroy(&program);
    return compiled;
  }

  Result<Entry> run(NvrtcLibrary::Program program, const std::string& region, const Source& source,
                    const std::string& arch, const std::vector<std::string>& more) const {
    auto texts = options(arch);
    texts.insert(texts.end(), more.begin(), more.end());
    std::vector<const char*> pointers;
    for (const auto& text : texts) pointers.push_back(text.c_str());
    const int result = nvrtc_.compile(program, static_cast<int>(pointers.size()), pointers.data());
    std::size_t size = 0;
    std::string log;
    if (nvrtc_.log_size(program, &size) == 0 && size > 1) {
      log.resize(size);
      nvrtc_.log(program, log.data());
      log.resize(size - 1);
    }
    if (result != 0) {
      const std::string kept = keep_source(region, ".cu", source.text);
      return internal_error("[nvrtc] region " + region + " for " + arch + ": " + nvrtc_.error_text(result) + ": " +
                            first_error(log) + (kept.empty() ? "" : "; the source is saved in " + kept));
    }
    Entry compiled{
        .region = region, .arch = arch, .kind = kernel_cache::Kind::kCubin, .source_bytes = source.text.size()};
    if (nvrtc_.cubin_size(program, &size) != 0 || size == 0)
      return internal_error("[nvrtc] region " + region + " for " + arch + ": NVRTC produced no cubin");
    compiled.code.resize(size);
    nvrtc_.cubin(program, compiled.code.data());
    for (const KernelLaunch& launch : source.kernels)
      for (const std::string& name : function_names(launch))
        compiled.kernels.push_back(
            {.name = name, .parameter_bytes = {static_cast<std::uint32_t>(launch.argument_words * 8)}});
    read_ptxas_log(log, compiled.kernels);
    for (const KernelInfo& kernel : compiled.kernels)
      if (kernel.registers == 0)
        return internal_error("[nvrtc] region " + region + " for " + arch + ": the log does not mention kernel " +
                              kernel.name);
    return compiled;
  }

  const NvrtcLibrary& nvrtc_;
};

}  // namespace

const std::vector<std::string>& gpu_architectures() {
  static const std::vector<std::string> known = {"sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"};
  return known;
}

void read_ptxas_log(std::string_view log, std::vector<KernelInfo>& kernels) {
  KernelInfo* current = nullptr;
  while (!log.empty()) {
    const auto end = log.find('\n');
    const std::string_view line = log.substr(0, end);
    log = end == std::string_view::npos ? std::string_view() : log.substr(end + 1);
    // "ptxas info    : Compiling entry function 'NAME' for 'sm_90a'"
    if (const auto at = line.find("Compiling entry function '"); at != std::string_view::npos) {
      const auto begin = at + 26;
      const std::string_view name = line.substr(begin, line.find('\'', begin) - begin);
      const auto found =
          std::find_if(kernels.begin(), kernels.end(), [&](const KernelInfo& k) { return k.name == name; });
      current = found == kernels.end() ? nullptr : &*found;
    } else if (current && line.find("bytes spill stores") != std::string_view::npos) {
      // "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
      current->spill_bytes = number_before(line, "bytes spill stores") + number_before(line, "bytes spill loads");
    } else if (current && line.find(" registers") != std::string_view::npos) {
      // "ptxas info    : Used 40 registers, used 1 barriers, 128 bytes smem, 960 bytes cmem[0]"
      current->registers = number_before(line, "registers");
      current->shared_bytes = number_before(line, "bytes smem");
    }
  }
}

Result<std::shared_ptr<const Compiler>> open_nvrtc(const std::string& given) {
  auto library = load_nvrtc(given);
  if (!library) return library.error();
  return std::shared_ptr<const Compiler>(std::make_shared<Nvrtc>(**library));
}

}  // namespace ditfleet::region
