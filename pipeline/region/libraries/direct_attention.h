// Attention on a GPU whose result is written where the next step reads it: cuDNN's, with plans that the fleet shares.
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

// Of a call on tensors [batch, tokens, heads, head size].
AttentionShape attention_shape(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out);

class DirectAttention {
 public:
  virtual ~DirectAttention() = default;
  // q, k, v, out: [batch, tokens, heads, head size] bf16 of one shape, any strides. softmax(q kᵀ · scale) v for each
  // head into `out`; scale 0: 1/√head size. A shape that is new has its plan from the kernel cache, where whoever saw
  // it first put it, else made in some 60 ms. On the calling thread's current device and stream. False, and nothing
  // done, where cuDNN has none (another type, rows that are not adjacent or not aligned to 16 bytes, an old library).
  // Throws pipeline::Failure. Thread safe.
  virtual bool run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                   double scale) const = 0;
  // A call of this shape is to come: what it lacks is made meanwhile, on a thread of its own. Does not wait, changes no
  // result. Thread safe.
  virtual void expect(const AttentionShape& shape) const = 0;
};

// For GPU `device`, LibTorch's current one, of architecture `arch`. Null where `backend` is another's, or is auto and
// LibTorch would not prefer cuDNN there. The library is opened by the first run().
std::shared_ptr<const DirectAttention> make_direct_attention(int device, const std::string& arch,
                                                             AttentionBackend backend,
                                                             std::shared_ptr<kernel_cache::KernelCache> cache);

// Runs a small attention and waits for it, by `direct` if that is not null and can, else by `backend`: so that the
// library (cuDNN: half a second) is loaded and the first real one makes but its plan. For a thread of its own, beside a
// compiler.
void open_attention(c10::Device device, c10::ScalarType type, std::int64_t heads, std::int64_t head_dim,
                    AttentionBackend backend, const DirectAttention* direct);

}  // namespace ditfleet::region
