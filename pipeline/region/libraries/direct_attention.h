// cuDNN's attention, called directly so that it writes its result where the next step reads it. The fleet shares plans.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "pipeline/region/libraries/attention.h"
#include "pipeline/region/libraries/cudnn.h"

namespace ditfleet::kernel_cache {
class KernelCache;
}

namespace ditfleet::region {

// Of tensors [batch, tokens, heads, head size]; k and v may have another number of tokens than q and out.
AttentionShape attention_shape(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out);

class DirectAttention {
 public:
  virtual ~DirectAttention() = default;
  // softmax(q kᵀ · scale) v for each head, into `out`; scale 0: 1/√head size. q, out: [batch, tokens, heads, head
  // size]; k, v: [batch, tokens of the keys, heads, head size]; bf16, any strides. Works on the calling thread's
  // current device and stream. The plan of a new shape comes from the kernel cache, else cuDNN makes it, which takes
  // some 60 ms. Returns false, and does nothing, if cuDNN cannot do it: another type, rows that are not contiguous or
  // not aligned to 16 bytes, an old library. Throws pipeline::Failure. Thread-safe.
  virtual bool run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                   double scale) const = 0;
  // Makes the plan for this shape in the background. Does not wait. Thread-safe.
  virtual void prewarm(const AttentionShape& shape) const = 0;
};

// For GPU `device`, LibTorch's current one, of architecture `arch`. Null if `backend` names another implementation, or
// is auto and LibTorch would not choose cuDNN there. The first run() opens the library.
std::shared_ptr<const DirectAttention> make_direct_attention(int device, const std::string& arch,
                                                             AttentionBackend backend,
                                                             std::shared_ptr<kernel_cache::KernelCache> cache);

// Runs a small attention and waits for it: by `direct` if it is not null and can, else by `backend`. Loads the library
// (half a second for cuDNN), so that the first real call only makes its plan. Meant to overlap with compilation.
void open_attention(c10::Device device, c10::ScalarType type, std::int64_t heads, std::int64_t head_dim,
                    AttentionBackend backend, const DirectAttention* direct);

}  // namespace ditfleet::region
