// Attention of a region, by one of the implementations that LibTorch has for the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ditfleet::region {

// auto: what LibTorch prefers (cuDNN in bf16 on Hopper). Others are its names for them: cudnn and efficient run on a
// GPU, flash on a GPU in bf16 and on a CPU, math everywhere, with all of the scores in memory.
enum class AttentionBackend { kAuto, kCudnn, kFlash, kEfficient, kMath };
std::string_view name_of(AttentionBackend backend);
std::optional<AttentionBackend> parse_attention(std::string_view name);
const std::vector<AttentionBackend>& attention_backends();  // all of them

// What scores are made of beside q kᵀ.
struct AttentionForm {
  at::Tensor bias;  // added to the scores: [1 or batch, 1 or heads, tokens, tokens of the keys]; undefined: none
  bool causal = false;
  double scale = 0;  // 0: 1/√head size
};

// q, k, v: [.., tokens, heads, head size] with rows that may be strided. softmax(q kᵀ · scale + bias) v for each head,
// as a new contiguous tensor of q's shape. Throws what LibTorch throws where the backend cannot do it. With a form of
// its own it is LibTorch's choice, or math.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, AttentionBackend backend,
                  const AttentionForm& form = {});

}  // namespace ditfleet::region
