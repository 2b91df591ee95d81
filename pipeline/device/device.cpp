#include "pipeline/device/device.h"

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>

#include "pipeline/device/cpu.h"
#include "pipeline/device/failure.h"
#include "shared/core/text.h"

namespace ditfleet::pipeline {
namespace {

std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  return "CPU";
}

// The driver's library, or null. Never unloaded.
void* driver_library() {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  return library;
}

// Number of GPUs according to the driver, without LibTorch; 0 without a driver.
int driver_device_count() {
  void* driver = driver_library();
  if (!driver) return 0;
  auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
  auto count = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDeviceGetCount"));
  int n = 0;
  return init && count && init(0) == 0 && count(&n) == 0 ? n : 0;
}

std::string driver_device_name(int index) {
  auto get = reinterpret_cast<int (*)(int*, int)>(dlsym(driver_library(), "cuDeviceGet"));
  auto name = reinterpret_cast<int (*)(char*, int, int)>(dlsym(driver_library(), "cuDeviceGetName"));
  int device = 0;
  char text[256] = "";
  if (!get || !name || get(&device, index) != 0 || name(text, sizeof text, device) != 0) return "GPU";
  return text;
}

// Loads LibTorch's CUDA part. Returns why that failed; empty on success. The library registers its kernels while
// loading and is never closed.
std::string load_cuda_part() {
  static std::mutex mutex;
  static bool done = false;
  static std::string problem;
  std::lock_guard lock(mutex);
  if (done) return problem;
  done = true;
  // Weights of many sizes come and go; without this, LibTorch's allocator keeps gigabytes that fit none of them.
  if (!std::getenv("PYTORCH_ALLOC_CONF") && !std::getenv("PYTORCH_CUDA_ALLOC_CONF"))
    ::setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True", 0);
  const auto path = libtorch_folder() / "libtorch_cuda.so";
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) {
    problem = path.string() +
              " is missing: this LibTorch has no CUDA part; deploy/setup.sh installs one on a "
              "machine with a GPU";
  } else if (!dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL)) {
    problem = path.string() + " does not load: " + last_dl_error() +
              "; install the full torch wheel with its nvidia packages";
  }
  return problem;
}

c10::Device cuda_device(int index) { return c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)); }

// The GPU index of "cuda" or "cuda:N"; empty for another word.
std::optional<int> cuda_index(const std::string& wanted) {
  if (wanted == "cuda") return 0;
  if (wanted.rfind("cuda:", 0) != 0) return {};
  return number_of(std::string_view(wanted).substr(5), 0);
}

}  // namespace

std::string last_dl_error() {
  const char* text = dlerror();
  return text ? text : "unknown error";
}

std::filesystem::path libtorch_folder() {
  Dl_info info{};
  // Any function of libtorch_cpu will do.
  if (!dladdr(reinterpret_cast<void*>(&at::globalContext), &info) || !info.dli_fname) return {};
  std::error_code ignored;
  auto real = std::filesystem::canonical(info.dli_fname, ignored);
  return (ignored ? std::filesystem::path(info.dli_fname) : real).parent_path();
}

DeviceChoice load_device(const std::string& wanted, int ahead) {
  const DeviceChoice cpu{c10::Device(c10::DeviceType::CPU), processor_name()};
  if (wanted == "cpu") return cpu;
  const bool automatic = wanted == "auto" || wanted.empty();
  auto index = automatic ? std::optional<int>(0) : cuda_index(wanted);
  if (!index)
    fail(Code::kInvalidArgument, "device is \"" + wanted + "\"; it must be auto, cpu, cuda or cuda:N (N from 0)",
         "device");
  const int count = driver_device_count();
  if (count == 0) {
    if (automatic) return cpu;
    fail(Code::kUnavailable,
         driver_library() ? "device " + wanted +
                                " was requested, but the NVIDIA driver reports no GPU (see nvidia-smi "
                                "and CUDA_VISIBLE_DEVICES); use device cpu"
                          : "device " + wanted +
                                " was requested, but no NVIDIA driver was found (libcuda.so.1 does not "
                                "load); use device cpu",
         "device");
  }
  *index += ahead;
  if (*index >= count)
    fail(Code::kInvalidArgument,
         "device " + wanted + (ahead > 0 ? " and " + std::to_string(ahead) + " more were" : " was") +
             " requested, but the driver reports " + std::to_string(count) +
             " GPUs: cuda:0 to cuda:" + std::to_string(count - 1),
         "device");
  if (std::string problem = load_cuda_part(); !problem.empty()) {
    if (automatic) return cpu;
    fail(Code::kUnavailable, "device " + wanted + " cannot be used: " + problem, "device");
  }
  if (at::detail::getCUDAHooks().getNumGPUs() <= *index) {
    if (automatic) return cpu;
    fail(Code::kUnavailable,
         "device " + wanted +
             " cannot be used: LibTorch finds no GPU; is the driver as new as "
             "LibTorch's CUDA?",
         "device");
  }
  // Otherwise fp32 convolutions run in TF32, with errors of 1e-3.
  at::globalContext().setAllowTF32CuDNN(false);
  at::globalContext().setAllowTF32CuBLAS(false);
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  return {cuda_device(*index), driver_device_name(*index)};
}

Placement for_convolutions(Placement placement) {
  if (placement.real_device().is_cpu() && !has_avx512()) placement.dtype = c10::ScalarType::Float;
  return placement;
}

std::string device_text(c10::Device device) {
  return device.is_cpu() ? "cpu" : "cuda:" + std::to_string(device.index());
}

void synchronize(c10::Device device) {
  if (!device.is_cuda()) return;
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

void synchronize_current(c10::Device device) {
  if (!device.is_cuda()) return;
  const c10::impl::VirtualGuardImpl impl(device.type());
  impl.synchronizeStream(impl.getStream(device));
}

void* current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

void release_cached_memory(c10::Device device) noexcept {
  if (device.is_cpu()) return;
  try {
    if (auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type())))
      allocator->emptyCache();
  } catch (...) {
    // The allocation failure is what the caller reports.
  }
}

namespace {

// One stream per thread. LibTorch's allocator caches memory per stream, so a new stream for every stage would fill the
// GPU with memory cached for old streams.
c10::Stream stream_of_thread(const c10::impl::VirtualGuardImpl& impl, c10::Device device) {
  thread_local std::map<c10::DeviceIndex, c10::Stream> streams;
  auto known = streams.find(device.index());
  if (known == streams.end()) known = streams.emplace(device.index(), impl.getStreamFromGlobalPool(device)).first;
  return known->second;
}

}  // namespace

struct StageScope::Guards {
  explicit Guards(c10::Device d) : device(d) {
    if (device.is_cpu()) return;
    impl.emplace(device.type());
    previous_device.emplace(impl->exchangeDevice(device));
    stream.emplace(stream_of_thread(*impl, device));
    previous_stream.emplace(impl->exchangeStream(*stream));
    begin.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    end.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    begin->record(*stream);
  }
  ~Guards() {
    if (!impl) return;
    try {
      impl->exchangeStream(*previous_stream);
      impl->uncheckedSetDevice(*previous_device);
    } catch (...) {
      // The device has failed; the stage has reported it.
    }
  }
  c10::Device device;
  c10::InferenceMode inference{true};
  std::optional<c10::impl::VirtualGuardImpl> impl;
  std::optional<c10::Device> previous_device;
  std::optional<c10::Stream> stream, previous_stream;
  std::optional<c10::Event> begin, end;  // of the current lap, on a GPU
  std::chrono::steady_clock::time_point began = std::chrono::steady_clock::now();
  std::int64_t lap_us = 0;
};

StageScope::StageScope(c10::Device device) : guards_(std::make_unique<Guards>(device)) {}
StageScope::~StageScope() = default;

void StageScope::finish() {
  Guards& g = *guards_;
  const auto now = std::chrono::steady_clock::now();
  if (!g.impl) {
    g.lap_us = std::chrono::duration_cast<std::chrono::microseconds>(now - std::exchange(g.began, now)).count();
    return;
  }
  g.end->record(*g.stream);
  g.impl->synchronizeStream(*g.stream);
  g.lap_us = std::llround(g.begin->elapsedTime(*g.end) * 1e3);
  std::swap(g.begin, g.end);
}

std::int64_t StageScope::lap_us() const { return guards_->lap_us; }

}  // namespace ditfleet::pipeline
