#include "worker/gpu_meter.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <utility>

#include "shared/telemetry/metrics.h"

namespace ditfleet::worker {
namespace {

// From nvml.h. Every function returns 0 on success.
struct Memory {
  unsigned long long total, free, used;  // NOLINT(google-runtime-int): as NVML declares it
};
using Device = void*;

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// The PCI bus id of a device as CUDA numbers it; empty without CUDA's driver.
std::string bus_id(int index) {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  int (*init)(unsigned) = nullptr;
  int (*get)(char*, int, int) = nullptr;
  std::array<char, 32> id{};
  if (!driver || !find(driver, "cuInit", init) || !find(driver, "cuDeviceGetPCIBusId", get) || init(0) != 0 ||
      get(id.data(), static_cast<int>(id.size()), index) != 0)
    return "";
  return id.data();
}

}  // namespace

struct GpuMeter::Nvml {
  void* library = nullptr;
  Device device = nullptr;
  int (*shutdown)() = nullptr;
  int (*power)(Device, unsigned*) = nullptr;             // milliwatts
  int (*energy)(Device, unsigned long long*) = nullptr;  // NOLINT(google-runtime-int): millijoules
  int (*memory)(Device, Memory*) = nullptr;
};

GpuMeter::GpuMeter(std::unique_ptr<Nvml> nvml, std::string gpu) : nvml_(std::move(nvml)), gpu_(std::move(gpu)) {}

GpuMeter::~GpuMeter() {
  nvml_->shutdown();
  dlclose(nvml_->library);
}

std::shared_ptr<const GpuMeter> GpuMeter::open(const std::string& device, int ahead, const std::string& library) {
  if (!device.starts_with("cuda")) return nullptr;
  const auto colon = device.find(':');
  const int index = ahead + (colon == std::string::npos ? 0 : std::atoi(device.c_str() + colon + 1));
  auto nvml = std::make_unique<Nvml>();
  int (*init)() = nullptr;
  int (*by_bus)(const char*, Device*) = nullptr;
  int (*by_index)(unsigned, Device*) = nullptr;
  nvml->library = dlopen(library.c_str(), RTLD_NOW);
  if (!nvml->library) return nullptr;
  const auto all_found = find(nvml->library, "nvmlInit_v2", init) &&
                         find(nvml->library, "nvmlShutdown", nvml->shutdown) &&
                         find(nvml->library, "nvmlDeviceGetHandleByPciBusId_v2", by_bus) &&
                         find(nvml->library, "nvmlDeviceGetHandleByIndex_v2", by_index) &&
                         find(nvml->library, "nvmlDeviceGetPowerUsage", nvml->power) &&
                         find(nvml->library, "nvmlDeviceGetTotalEnergyConsumption", nvml->energy) &&
                         find(nvml->library, "nvmlDeviceGetMemoryInfo", nvml->memory);
  if (!all_found || init() != 0) {
    dlclose(nvml->library);
    return nullptr;
  }
  const std::string bus = bus_id(index);
  const int status =
      bus.empty() ? by_index(static_cast<unsigned>(index), &nvml->device) : by_bus(bus.c_str(), &nvml->device);
  std::shared_ptr<const GpuMeter> meter(new GpuMeter(std::move(nvml), bus.empty() ? std::to_string(index) : bus));
  return status == 0 ? meter : nullptr;
}

std::optional<double> GpuMeter::energy_j() const {
  unsigned long long millijoules = 0;  // NOLINT(google-runtime-int)
  if (nvml_->energy(nvml_->device, &millijoules) != 0) return std::nullopt;
  return static_cast<double>(millijoules) * 1e-3;
}

void GpuMeter::record() const {
  static const telemetry::Gauges watts("ditfleet_gpu_power_watts"), used("ditfleet_gpu_memory_used_bytes"),
      total("ditfleet_gpu_memory_bytes");
  static const telemetry::Counters joules("ditfleet_gpu_energy_joules_total");
  if (unsigned milliwatts = 0; nvml_->power(nvml_->device, &milliwatts) == 0)
    watts({gpu_}).Set(static_cast<double>(milliwatts) * 1e-3);
  if (Memory memory{}; nvml_->memory(nvml_->device, &memory) == 0) {
    used({gpu_}).Set(static_cast<double>(memory.used));
    total({gpu_}).Set(static_cast<double>(memory.total));
  }
  if (const auto now = energy_j()) {
    auto counter = joules({gpu_});
    std::call_once(recorded_, [&] { start_j_ = *now; });
    counter.Increment(std::max(0.0, *now - start_j_ - counter.Value()));
  }
}

}  // namespace ditfleet::worker
