// A cubin loaded on a GPU through the driver API, which is opened at run time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pipeline/region/codegen/source.h"
#include "shared/core/result.h"
#include "shared/kernel_cache/entry.h"

namespace ditfleet::region {

// The architecture to compile for on this device ("sm_90a"). kUnavailable: no driver, no such device, or an unsupported
// architecture.
Result<std::string> gpu_architecture(int device);

class GpuModule {
 public:
  enum Variant { kI32Vector, kI64Vector, kI64Scalar, kVariants };

  // Loads into the device's primary context, which LibTorch uses. kUnavailable: no driver. kDeviceFault: the device
  // cannot be used. kOutOfMemory. kDataCorrupt: not a cubin for this device, or a kernel is missing.
  static Result<std::shared_ptr<const GpuModule>> load(const kernel_cache::Entry& entry, const Source& source,
                                                       int device);
  ~GpuModule();
  GpuModule(const GpuModule&) = delete;
  GpuModule& operator=(const GpuModule&) = delete;

  const KernelLaunch& launch_of(std::size_t kernel) const { return launches_[kernel]; }
  // Launches a kernel on a stream (a CUstream). `argument`: launch_of(kernel).argument_words words. kDeviceFault.
  Result<void> start(std::size_t kernel, Variant variant, std::int64_t blocks, const std::vector<long long>& argument,
                     void* stream) const;

 private:
  GpuModule() = default;
  int device_ = 0;
  void* module_ = nullptr;
  std::vector<KernelLaunch> launches_;
  std::vector<void*> functions_;  // kVariants per kernel
};

}  // namespace ditfleet::region
