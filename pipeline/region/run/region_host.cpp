#include "pipeline/region/run/region_host.h"

#include "pipeline/device/failure.h"
#include "pipeline/region/compile/cpu_jit.h"
#include "pipeline/region/compile/gpu_module.h"
#include "pipeline/region/compile/nvrtc.h"

namespace ditfleet::region {
namespace {

AttentionBackend attention_for(const std::string& name, c10::Device device) {
  const AttentionBackend backend = parse_attention(name).value_or(AttentionBackend::kAuto);
  if (device.is_cpu() && (backend == AttentionBackend::kCudnn || backend == AttentionBackend::kFlash3 ||
                          backend == AttentionBackend::kEfficient))
    pipeline::fail(
        Code::kInvalidArgument,
        "compile.attention is " + name + ", which needs a GPU, but the device is cpu; use auto, flash or math",
        "compile.attention");
  return backend;
}

Result<void> open_gpu(RegionHost& host, const CompileOptions& options, c10::Device device) {
  host.device = std::max<int>(0, device.index());
  auto arch = gpu_architecture(host.device);
  if (!arch) return arch.error();
  auto compiler = open_nvrtc(options.nvrtc);
  if (!compiler) return compiler.error();
  host.arch = *arch;
  host.gemm = std::make_shared<const Gemm>(host.device);
  host.direct_attention = make_direct_attention(host.device, host.arch, host.attention, host.cache);
  host.compiler = *compiler;
  return {};
}

Result<void> open_host(RegionHost& host, const CompileOptions& options) {
  auto compiler = open_cpu_jit(options.cxx);
  if (!compiler) return compiler.error();
  host.compiler = *compiler;
  host.arch = kHostArch;
  return {};
}

}  // namespace

void RegionHost::fall_back(const std::string& region, const std::string& reason, const std::string& message) const {
  if (dry) return;
  if (options.fullgraph)
    pipeline::fail(Code::kInvalidArgument,
                   "compile.fullgraph is set and region " + region + " would run eagerly (" + reason + "): " + message,
                   "compile.fullgraph");
  bool first = false;
  {
    std::lock_guard lock(mutex_);
    first = fallen_back_.emplace(region, reason).second;
  }
  counters->fell_back(region, reason, message, first);
}

Result<CachedProgram> RegionHost::compile(const kernel_cache::Key& key, const std::string& name, const Source& source,
                                          const std::string& reason, const Validator& usable) const {
  const auto begun = std::chrono::steady_clock::now();
  auto made = compile_cached(*cache, key, name, source, *compiler, arch, usable);
  const auto took = std::chrono::steady_clock::now() - begun;
  if (made)
    counters->program_took(compiler->name(), reason, made->compiled,
                           std::chrono::duration_cast<std::chrono::microseconds>(took));
  return made;
}

std::shared_ptr<RegionHost> make_region_host(CompileOptions options, c10::Device device,
                                             std::shared_ptr<kernel_cache::KernelCache> cache) {
  auto host = std::make_shared<RegionHost>();
  host->cache = std::move(cache);
  if (!host->cache) host->cache = make_memory_cache();

  const bool automatic = options.backend == "auto";
  const std::string backend = !automatic ? options.backend : device.is_cpu() ? "cpu_jit" : "nvrtc";
  if (backend == "cpu_jit" && !device.is_cpu())
    pipeline::fail(Code::kInvalidArgument,
                   "compile.backend is cpu_jit, which needs a CPU, but the device is a GPU; use auto, nvrtc or eager",
                   "compile.backend");
  if (backend == "nvrtc" && device.is_cpu())
    pipeline::fail(Code::kInvalidArgument,
                   "compile.backend is nvrtc, which needs a GPU, but the device is cpu; use auto, cpu_jit or eager",
                   "compile.backend");
  host->attention = attention_for(options.attention, device);
  if (backend != "eager") {
    auto opened = backend == "nvrtc" ? open_gpu(*host, options, device) : open_host(*host, options);
    if (!opened && (!automatic || options.fullgraph)) throw pipeline::Failure(opened.error());
    if (!opened) host->counters->fell_back("all", "no_compiler", opened.error().message, true);
  }
  if (options.vae.value_or(false) && backend != "eager" && device.is_cpu()) {
    const std::string message = "compile.components.vae is true, but on a CPU the VAE runs eagerly; use auto or false";
    if (options.fullgraph) pipeline::fail(Code::kInvalidArgument, message, "compile.components.vae");
    host->counters->fell_back("vae", "unsupported_device", message, true);
  }
  host->options = std::move(options);
  return host;
}

std::shared_ptr<RegionHost> make_dry_host(const RegionHost& host) {
  auto made = std::make_shared<RegionHost>();
  made->options = host.options;
  made->compiler = host.compiler;
  made->arch = host.arch;
  made->device = host.device;
  made->cache = host.cache;
  made->ranks = host.ranks;
  made->dry = true;
  return made;
}

}  // namespace ditfleet::region
