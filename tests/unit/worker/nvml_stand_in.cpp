// The functions of NVML that GpuMeter calls, for one GPU.
#include <cstring>

namespace {
int device;
struct Memory {
  unsigned long long total, free, used;
};
}  // namespace

extern "C" {
int nvmlInit_v2() { return 0; }
int nvmlShutdown() { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** out) {
  *out = &device;
  return index == 0 ? 0 : 6;  // not found
}
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** out) { return nvmlDeviceGetHandleByIndex_v2(0, out); }
int nvmlDeviceGetPowerUsage(void* of, unsigned* milliwatts) {
  *milliwatts = 350'500;
  return of == &device ? 0 : 2;
}
int nvmlDeviceGetTotalEnergyConsumption(void* of, unsigned long long* millijoules) {
  static unsigned long long used = 1'000'000;
  *millijoules = used += 5'000;
  return of == &device ? 0 : 2;
}
int nvmlDeviceGetMemoryInfo(void* of, Memory* memory) {
  *memory = {80'000'000'000, 77'000'000'000, 3'000'000'000};
  return of == &device ? 0 : 2;
}
}
