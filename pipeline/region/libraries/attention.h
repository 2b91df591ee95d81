// Attention of a region by name, and LibTorch's implementations.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ditfleet::region {

// auto is the fastest on a GPU (direct_attention.h), and LibTorch's preference on a CPU. cudnn, fa3 and efficient run
// on a GPU, fa3 only on Hopper. flash runs on a CPU, and in bf16 on a GPU. math runs everywhere, but keeps all scores
// in memory.
enum class AttentionBackend { kAuto, kCudnn, kFlash3, kFlash, kEfficient, kMath };
std::string_view name_of(AttentionBackend backend);
std::optional<AttentionBackend> parse_attention(std::string_view name);
const std::vector<AttentionBackend>& attention_backends();  // all of them

// softmax(q kᵀ / √head size) v for each head, as a new contiguous tensor of q's shape. q, k, v: [.., tokens, heads,
// head size], rows may be strided; k and v may have another number of tokens than q. Throws what LibTorch throws if the
// backend cannot do it. LibTorch does not have fa3; it counts as auto here.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, AttentionBackend backend);

// Whether the rows, along the last axis, are contiguous and aligned to 16 bytes.
bool has_aligned_rows(const at::Tensor& t);

}  // namespace ditfleet::region
