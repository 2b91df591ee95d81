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
  // softmax(q kᵀ / √head size) v for each head, into `out`. q, out: [batch, tokens, heads, head size]; k, v: [batch,
  // tokens of the keys, heads, head size]; bf16, any strides. Works on the calling thread's current device and stream.
  // The plan of a new shape comes from the kernel cache, else cuDNN makes it in about 60 ms. Returns false, and does
  // nothing, if cuDNN does not support the arguments: another type, rows that are not contiguous or not aligned to 16
  // bytes, or an old library. Throws pipeline::Failure. Thread-safe.
  virtual bool run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out) const = 0;
  // Makes the plan for this shape in the background. Does not wait. Thread-safe.
  virtual void prewarm(const AttentionShape& shape) const = 0;
};

// `device` must be LibTorch's current GPU; `arch` is its architecture. Returns null if `backend` is another
// implementation, or if it is auto and LibTorch would not choose cuDNN on this GPU. The first run() opens the library.
std::shared_ptr<const DirectAttention> make_direct_attention(int device, const std::string& arch,
                                                             AttentionBackend backend,
                                                             std::shared_ptr<kernel_cache::KernelCache> cache);

// Loads the attention library by running a small attention, with `direct` if possible, else with `backend`. Loading
// cuDNN takes half a second; the first real call then only makes its plan. Blocks; run it while programs are compiled.
void open_attention(c10::Device device, c10::ScalarType type, std::int64_t heads, std::int64_t head_dim,
                    AttentionBackend backend, const DirectAttention* direct);

}  // namespace ditfleet::region
