// Which attention is fastest on this GPU for a shape: timed once, and remembered by the whole fleet.
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
  // kAuto (what runs where nothing is timed), or another that is faster by 2 % and more: flash, or where no cuDNN is
  // called directly cuDNN by LibTorch. When the shape is first seen, and the kernel cache has no choice of a GPU like
  // this one, start(backend) is called for each, several times over; it puts the attention on the calling thread's
  // current stream, `bytes` of memory at a time, and throws where the backend cannot do it. Thread safe.
  virtual AttentionBackend choose(const AttentionShape& shape, std::uint64_t bytes,
                                  const std::function<void(AttentionBackend)>& start) const = 0;
};

// For GPU `device`, LibTorch's current one, of architecture `arch`. direct: kAuto is cuDNN's, called directly. Throws
// pipeline::Failure (kDeviceFault).
std::shared_ptr<const TimedAttention> make_timed_attention(int device, std::string arch, bool direct,
                                                           std::shared_ptr<kernel_cache::KernelCache> cache);

}  // namespace ditfleet::region
