// Attention that writes its result where the next step reads it: by cuDNN, FlashAttention-3 or LibTorch's flash,
// whichever is measured fastest.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>

#include "pipeline/region/libraries/attention.h"
#include "pipeline/region/libraries/cudnn.h"
#include "shared/core/result.h"

namespace ditfleet::kernel_cache {
class KernelCache;
}

namespace ditfleet::region {

// Of tensors [batch, tokens, heads, head size]; k and v may have another number of tokens than q and out.
AttentionShape attention_shape(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out);

class DirectAttention {
 public:
  virtual ~DirectAttention() = default;
  // "cudnn", "fa3" or "flash", and the library's version if it is not LibTorch's own. Part of the keys of choices.
  virtual std::string name() const = 0;
  // softmax(q kᵀ / √head size) v for each head, into `out`. q, out: [batch, tokens, heads, head size]; k, v: [batch,
  // tokens of the keys, heads, head size]; any strides; bf16. Or q, k and v are f8, and v's values are codes · scale,
  // with a scale for each head: `v_scales`, fp32 [batch, heads]. Works on the calling thread's current device and
  // stream.
  // Returns false, and does nothing, if the library does not support the arguments, such as another type, or rows that
  // are not contiguous or not aligned to 16 bytes. Throws pipeline::Failure, and what LibTorch throws. Thread-safe.
  virtual bool run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                   const at::Tensor& v_scales = {}) const = 0;
  // Whether run() takes f8. May wait until the library is open.
  virtual bool has_f8() const { return false; }
  // Prepares for this shape in the background. Does not wait. Thread-safe.
  virtual void prewarm(const AttentionShape&) const {}
};

// cuDNN's. The fleet shares its plans: the plan of a new shape comes from the kernel cache, else cuDNN makes it in
// about 60 ms. `device` must be LibTorch's current GPU; `arch` is its architecture. The first run() opens the library;
// run() returns false if it is too old.
std::shared_ptr<const DirectAttention> make_cudnn_attention(int device, const std::string& arch,
                                                            std::shared_ptr<kernel_cache::KernelCache> cache);

// FlashAttention-3's kernels for Hopper. Looks for fa3_fwd/_C.abi3.so beside LibTorch's folder, as pip and
// ditfleet-worker-setup --fa3 install it, or for the file that the variable DITFLEET_FA3 names. Compares its SHA-256
// with the pinned one before loading it. kUnavailable: no such file, another file, or one that does not fit this
// LibTorch; the message says what would be right. Blocks for 0.2 s.
Result<std::shared_ptr<const DirectAttention>> open_flash3();

// LibTorch's flash attention. Its result is copied.
std::shared_ptr<const DirectAttention> make_flash_attention();

// What `backend` asks for on a GPU of this architecture: one library for cudnn and fa3, an AttentionTable of all that
// this GPU has for auto, null for LibTorch's others. Logs what auto chooses from. The libraries open in the background
// or at the first use. Throws pipeline::Failure (kUnavailable) if `backend` is fa3 and it cannot run.
std::shared_ptr<const DirectAttention> make_direct_attention(int device, const std::string& arch,
                                                             AttentionBackend backend,
                                                             std::shared_ptr<kernel_cache::KernelCache> cache);

// Loads the attention library by running a small attention, with `direct` if possible, else with `backend`. Loading
// cuDNN takes half a second; the first real call then only makes its plan. Blocks; run it while programs are compiled.
void open_attention(c10::Device device, c10::ScalarType type, std::int64_t heads, std::int64_t head_dim,
                    AttentionBackend backend, const DirectAttention* direct);

// Whether a tensor is [batch, tokens, heads, head size] of this type, not empty, with aligned rows.
bool is_operand(const at::Tensor& t, c10::ScalarType type = c10::ScalarType::BFloat16);

}  // namespace ditfleet::region
