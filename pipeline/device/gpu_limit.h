// The limit of LibTorch's allocator for GPUs.
#pragma once

#include <c10/core/Device.h>

namespace ditfleet::pipeline {

// `fraction`: of the GPU's memory. Throws Failure (kUnavailable) if the program was built without CUDA's headers,
// unless the fraction is 1.
void limit_gpu_memory(c10::DeviceIndex gpu, double fraction);

}  // namespace ditfleet::pipeline
