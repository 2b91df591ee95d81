// Products of fp8 matrices (E4M3, largest value 448) with one fp32 scale per row, computed with LibTorch. Generated
// kernels and cuBLASLt compute the same; this code is their reference and runs where they are not available. Numerics
// as torchao's Float8DynamicActivationFloat8WeightConfig(PerRow()), except that scales are not rounded to bf16.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>

namespace ditfleet::region {

// Whether the device has fp8 products: a GPU from compute capability 8.9 on. True for a CPU, which emulates them.
bool has_fp8_products(c10::Device device);

// The scale of each row (last axis) of x [.., n]: max |x| / 448, at least kLeastRowScale. Returns [.., 1] fp32.
at::Tensor fp8_row_scales(const at::Tensor& x);
// x · (1 / scales), rounded to the nearest E4M3 value, ties to even. `scales` broadcasts to x. Returns x's shape.
at::Tensor fp8_codes(const at::Tensor& x, const at::Tensor& scales);

// The operands of a product. x: codes [.., in] and their scales [.., 1]; weight: codes [out, in] and scales [out].
struct Fp8Product {
  at::Tensor x, x_scales, weight, weight_scales;
  at::Tensor bias = {};    // [out], or undefined
  at::Tensor addend = {};  // [.., out], or undefined
};
// x · weightᵀ · scales + bias + addend, summed in fp32 and rounded once. Returns [.., out] of this type.
at::Tensor fp8_linear(const Fp8Product& product, c10::ScalarType type);

// v [.., tokens, heads, size] as codes and the scale of each sample and head, as FlashAttention-3 reads them. Returns
// the codes, contiguous, and [.., heads] fp32: max |v| / 448, at least kLeastRowScale.
std::pair<at::Tensor, at::Tensor> fp8_heads(const at::Tensor& v);
using F8Heads = std::function<std::pair<at::Tensor, at::Tensor>(const at::Tensor& v)>;  // computes the same
// Attention with f8 q and k as OpCode::kAttention computes it, in v's type by `attend`, which is the same for tensors
// of one type. Only q, k and v are rounded to f8; the library also rounds the softmax.
at::Tensor fp8_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v)>& attend);

}  // namespace ditfleet::region
