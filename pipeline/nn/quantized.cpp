#include "pipeline/nn/quantized.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <array>

#include "pipeline/region/libraries/fp8.h"
#include "pipeline/weights/gguf.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kBlock = 64;
constexpr float kLeastMagnitude = 1e-38F;  // of a block of zeros

at::Tensor on_device(const float* values, std::int64_t count, c10::Device device) {
  return at::from_blob(const_cast<float*>(values), {count}, at::TensorOptions(c10::ScalarType::Float)).to(device);
}

template <class T>
void nf4_values(const QuantizedRows& part, const at::Tensor& to) {
  const auto* codes = part.codes.const_data_ptr<std::uint8_t>();
  const auto* scales = part.scales.const_data_ptr<float>();
  T* values = to.mutable_data_ptr<T>();
  at::parallel_for(0, part.scales.size(0), 256, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first * kBlock, end = std::min(last * kBlock, to.numel()); i < end; ++i) {
      const unsigned byte = codes[i / 2];
      values[i] = static_cast<T>(kNf4Book[i % 2 == 0 ? byte >> 4 : byte & 15] * scales[i / kBlock]);
    }
  });
}

// For a GPU without the program.
void nf4_values_by_operators(const QuantizedRows& part, const at::Tensor& to) {
  const std::int64_t values = to.numel(), blocks = part.scales.size(0);
  const at::Tensor book = on_device(kNf4Book.data(), static_cast<std::int64_t>(kNf4Book.size()), to.device());
  const at::Tensor codes = at::stack({part.codes.__rshift__(4), part.codes.bitwise_and(15)}, 1).flatten();
  const at::Tensor unscaled = at::constant_pad_nd(at::index_select(book, 0, codes.to(c10::ScalarType::Int)),
                                                  {0, blocks * kBlock - codes.numel()});
  to.view({values}).copy_((unscaled.view({blocks, kBlock}) * part.scales.unsqueeze(1)).flatten().narrow(0, 0, values));
}

void dequantize_rows(const QuantizedRows& part, const region::Dequantizer* program, const at::Tensor& to) {
  if (part.blocks != 0 && program)
    program->run({part.codes, {}, to, part.blocks});
  else if (part.blocks != 0)
    to.copy_(gguf_tensor(part.blocks, part.codes.cpu()).view(to.sizes()));
  else if (!part.scales.defined())
    to.copy_(part.codes);
  else if (program)
    program->run({part.codes, part.scales, to});
  else if (part.codes.scalar_type() != c10::ScalarType::Byte)
    to.copy_(part.codes.to(c10::ScalarType::Float) * part.scales.unsqueeze(1));
  else if (!to.is_cpu())
    nf4_values_by_operators(part, to);
  else if (to.scalar_type() == c10::ScalarType::BFloat16)
    nf4_values<c10::BFloat16>(part, to);
  else
    nf4_values<float>(part, to);
}

}  // namespace

std::int64_t QuantizedWeight::bytes() const {
  std::int64_t total = 0;
  for (const QuantizedRows& part : parts)
    total += static_cast<std::int64_t>(part.codes.nbytes() + (part.scales.defined() ? part.scales.nbytes() : 0));
  return total;
}

std::string_view QuantizedWeight::format() const {
  if (dynamic) return "fp8 with dynamic activations";
  for (const QuantizedRows& part : parts)
    if (part.blocks != 0) return gguf_blocks(part.blocks).name;
  for (const QuantizedRows& part : parts)
    if (part.scales.defined()) return part.codes.scalar_type() == c10::ScalarType::Byte ? "nf4" : "fp8";
  return "plain";
}

at::Tensor gguf_tensor(std::uint8_t number, const at::Tensor& codes) {
  const GgufBlocks& blocks = gguf_blocks(number);
  const std::int64_t count = codes.numel() / blocks.bytes;
  const at::Tensor values = at::empty({count * blocks.values}, c10::ScalarType::Float);
  const auto* from = static_cast<const std::byte*>(codes.const_data_ptr());
  auto* to = values.mutable_data_ptr<float>();
  at::parallel_for(0, count, 64, [&](std::int64_t first, std::int64_t last) {
    gguf_values(number, from + first * blocks.bytes, last - first, to + first * blocks.values);
  });
  return values;
}

QuantizedRows quantize_nf4(const at::Tensor& weight) {
  const std::int64_t values = weight.numel(), blocks = (values + kBlock - 1) / kBlock, ragged = values % kBlock;
  if (weight.is_meta())
    return {at::empty({(values + 1) / 2}, weight.options().dtype(c10::ScalarType::Byte)),
            at::empty({blocks}, weight.options().dtype(c10::ScalarType::Float)), weight.size(0)};
  const at::Tensor flat =
      at::constant_pad_nd(weight.to(c10::ScalarType::Float).flatten(), {0, blocks * kBlock - values})
          .view({blocks, kBlock});
  const at::Tensor largest = at::amax(at::abs(flat), {1}, /*keepdim=*/true);
  const at::Tensor safe = at::where(largest == 0, at::full_like(largest, kLeastMagnitude), largest);
  at::Tensor unit = flat * (1 / safe);
  // bitsandbytes divides in a shorter last block, and stores the magnitude of an all-zero one as 1e-38.
  at::Tensor scales = largest.flatten();
  if (ragged != 0) {
    unit.select(0, blocks - 1).copy_(flat.select(0, blocks - 1) / safe.select(0, blocks - 1));
    scales = at::cat({scales.narrow(0, 0, blocks - 1), safe.flatten().narrow(0, blocks - 1, 1)});
  }
  std::array<float, 15> midpoints;
  for (std::size_t i = 0; i < midpoints.size(); ++i) midpoints[i] = (kNf4Book[i] + kNf4Book[i + 1]) / 2;
  // The number of midpoints below each value.
  const at::Tensor codes = at::bucketize(at::clamp(unit, -1, 1).flatten().narrow(0, 0, values),
                                         on_device(midpoints.data(), 15, weight.device()), /*out_int32=*/true)
                               .to(c10::ScalarType::Byte);
  const at::Tensor pairs = at::constant_pad_nd(codes, {0, values % 2}, 7).view({(values + 1) / 2, 2});
  return {pairs.select(1, 0).__lshift__(4).bitwise_or(pairs.select(1, 1)), scales, weight.size(0)};
}

QuantizedRows quantize_fp8(const at::Tensor& weight) {
  const at::Tensor scales = region::fp8_row_scales(weight);
  return {region::fp8_codes(weight, scales), scales.flatten(), weight.size(0)};
}

void dequantize(const QuantizedWeight& weight, const at::Tensor& to) {
  if (to.is_meta()) return;
  std::int64_t first = 0;
  for (const QuantizedRows& part : weight.parts) {
    dequantize_rows(part, weight.program.get(), to.narrow(0, first, part.rows));
    first += part.rows;
  }
}

at::Tensor dequantized(const QuantizedWeight& weight, c10::ScalarType type) {
  const at::Tensor to = at::empty({weight.out, weight.in}, weight.parts.front().codes.options().dtype(type));
  dequantize(weight, to);
  return to;
}

at::Tensor quantized_linear(const QuantizedWeight& weight, const at::Tensor& bias, const at::Tensor& x) {
  if (weight.dynamic) {
    const QuantizedRows& all = weight.parts.front();
    const at::Tensor scales = region::fp8_row_scales(x);
    return region::fp8_linear({.x = region::fp8_codes(x, scales),
                               .x_scales = scales,
                               .weight = all.codes,
                               .weight_scales = all.scales,
                               .bias = bias},
                              x.scalar_type());
  }
  const auto converted = [&](const at::Tensor& t) { return t.defined() ? t.to(weight.compute) : t; };
  return at::linear(converted(x), dequantized(weight, weight.compute), converted(bias)).to(x.scalar_type());
}

}  // namespace ditfleet::pipeline
