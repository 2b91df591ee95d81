// Chooses the fastest attention for a shape on this GPU. The choice is timed once and shared by the fleet through the
// kernel cache.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "pipeline/region/libraries/attention.h"
#include "pipeline/region/libraries/cudnn.h"

namespace ditfleet::kernel_cache {
class KernelCache;
}

namespace ditfleet::region {

class TimedAttention {
 public:
  virtual ~TimedAttention() = default;
  // Returns kAuto (the default without timing) or a backend that is at least 2 % faster: flash, or LibTorch's cuDNN if
  // cuDNN is not called directly. For a new shape without a choice in the kernel cache it calls start(backend) several
  // times for each backend. start() must enqueue the attention on the calling thread's current stream and throw if the
  // backend does not support it. `bytes`: the memory that start() needs. Thread-safe.
  virtual AttentionBackend choose(const AttentionShape& shape, std::uint64_t bytes,
                                  const std::function<void(AttentionBackend)>& start) const = 0;
};

// `device` must be LibTorch's current GPU; `arch` is its architecture. With `direct`, AttentionBackend::kAuto calls
// cuDNN without LibTorch. Throws pipeline::Failure (kDeviceFault).
std::shared_ptr<const TimedAttention> make_timed_attention(int device, std::string arch, bool direct,
                                                           std::shared_ptr<kernel_cache::KernelCache> cache);

}  // namespace ditfleet::region
