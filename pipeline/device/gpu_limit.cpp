#include "pipeline/device/gpu_limit.h"

#include <c10/core/Allocator.h>

#include "pipeline/device/failure.h"
#if __has_include(<cuda_runtime_api.h>) && __has_include(<c10/cuda/CUDACachingAllocator.h>)
#include <c10/cuda/CUDACachingAllocator.h>
#define DITFLEET_CUDA_HEADERS 1
#endif

namespace ditfleet::pipeline {

// In a file of its own: beside calls of other allocators' functions, the compiler would guess that they are this
// class's, whose symbols are in LibTorch's CUDA part.
void limit_gpu_memory(c10::DeviceIndex gpu, double fraction) {
#ifdef DITFLEET_CUDA_HEADERS
  auto* const allocator =
      static_cast<c10::cuda::CUDACachingAllocator::CUDAAllocator*>(c10::GetAllocator(c10::DeviceType::CUDA));
  allocator->setMemoryFraction(fraction, gpu);
#else
  if (fraction < 1)
    fail(Code::kUnavailable, "this program was built without CUDA's headers and cannot limit a GPU's memory",
         "memory.limit");
#endif
}

}  // namespace ditfleet::pipeline
