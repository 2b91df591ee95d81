// Power, energy and memory of a GPU, by NVIDIA's management library (NVML), which is opened at run time.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace ditfleet::worker {

// Thread-safe.
class GpuMeter {
 public:
  // `device`: "cuda:N", as CUDA numbers the visible devices; opens the GPU that is `ahead` GPUs behind it. Null: it is
  // no GPU, or the library or the GPU is not there.
  static std::shared_ptr<const GpuMeter> open(const std::string& device, int ahead = 0,
                                              const std::string& library = "libnvidia-ml.so.1");
  ~GpuMeter();

  // Since the driver was loaded; empty if the GPU does not measure it.
  std::optional<double> energy_j() const;
  // Sets the metrics of power, energy and memory.
  void record() const;

 private:
  struct Nvml;
  GpuMeter(std::unique_ptr<Nvml> nvml, std::string gpu);
  const std::unique_ptr<Nvml> nvml_;
  const std::string gpu_;  // the metrics' label: the PCI bus id
  mutable std::once_flag recorded_;
  mutable double start_j_ = 0;  // energy_j() at the first record()
};

}  // namespace ditfleet::worker
