#include "pipeline/nn/parameters.h"

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <optional>

#include "pipeline/device/failure.h"
#include "shared/core/excerpt.h"

namespace ditfleet::pipeline {
namespace {

// Element types that weights may come in; what is quantized needs more than a cast.
std::optional<c10::ScalarType> scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kF32: return c10::ScalarType::Float;
    case DType::kF16: return c10::ScalarType::Half;
    case DType::kBF16: return c10::ScalarType::BFloat16;
    case DType::kF64: return c10::ScalarType::Double;
    case DType::kF8E4M3: return c10::ScalarType::Float8_e4m3fn;
    case DType::kF8E5M2: return c10::ScalarType::Float8_e5m2;
    default: return {};
  }
}

constexpr std::int64_t kBlock = 16 << 20;  // bytes that a thread reads at a time

}  // namespace

at::Tensor copy_to(Placement placement, const TensorView& view) {
  const auto type = scalar_type(view.dtype);
  if (!type)
    fail(Code::kDataCorrupt, "tensor " + std::string(view.name) + " is of type " + std::string(dtype_name(view.dtype)) +
                                 "; weights must be F32, BF16, F16, F64 or F8");
  return at::from_blob(const_cast<std::byte*>(view.bytes.data()), Shape(view.shape.begin(), view.shape.end()), *type)
      .to(placement.device, placement.dtype, /*non_blocking=*/false, /*copy=*/true);
}

Parameters::Parameters(Checkpoint checkpoint, Placement placement)
    : checkpoint_(std::move(checkpoint)), placement_(placement) {}

Parameters Parameters::open(const std::string& dir, Library library, Placement placement) {
  return Parameters(unwrap(Checkpoint::open(dir, library)), placement);
}

at::Tensor Parameters::tensor(const std::string& name, const Shape& shape) {
  const auto [file, entry] = unwrap(checkpoint_.tensor(name));
  if (entry->shape != shape)
    fail(Code::kDataCorrupt, dir() + ": tensor " + name + " has shape " + shape_text(entry->shape) +
                                 ", but config.json requires " + shape_text(shape));
  const auto type = scalar_type(entry->dtype);
  if (!type)
    fail(Code::kDataCorrupt, dir() + ": tensor " + name + " is of type " + std::string(dtype_name(entry->dtype)) +
                                 "; weights must be F32, BF16, F16, F64 or F8");
  // Straight into the returned tensor if it is on the host and of the file's type. Otherwise through memory that is
  // reused, because the kernel clears new memory, which takes longer than reading.
  const bool direct = placement_.device.is_cpu() && placement_.dtype == *type;
  const auto size = static_cast<std::int64_t>(entry->end - entry->begin);
  if (!direct && staging_.numel() < size) staging_ = at::empty({size}, at::kByte);
  at::Tensor out = direct ? at::empty(shape, *type) : at::from_blob(staging_.mutable_data_ptr(), shape, *type);
  auto* const bytes = static_cast<std::byte*>(out.mutable_data_ptr());
  at::parallel_for(0, (size + kBlock - 1) / kBlock, 1, [&](std::int64_t first, std::int64_t last) {
    const std::int64_t begin = first * kBlock, end = std::min(size, last * kBlock);
    unwrap(file.read(*entry, static_cast<std::uint64_t>(begin), {bytes + begin, bytes + end}));
  });
  if (!direct) out = out.to(placement_.device, placement_.dtype, /*non_blocking=*/false, /*copy=*/true);
  bytes_ += static_cast<std::int64_t>(out.nbytes());
  taken_.insert(name);
  return out;
}

std::vector<std::string> Parameters::unused(std::string_view prefix) const {
  std::vector<std::string> left;
  for (const std::string& name : names())
    if (name.starts_with(prefix) && !taken_.contains(name)) left.push_back(name);
  return left;
}

void Parameters::warn_of_unused(std::string_view prefix) const {
  const auto left = unused(prefix);
  if (left.empty()) return;
  spdlog::warn("{}: {} weights are not used, such as {}; config.json describes a smaller model", dir(), left.size(),
               excerpt(left.front(), 120));
}

LinearSlot Parameters::linear(const std::string& prefix, std::int64_t in, std::int64_t out, bool bias,
                              LoraColumns lora_columns) {
  return stacked_linear({prefix}, in, out, bias, lora_columns);
}

LinearSlot Parameters::stacked_linear(const std::vector<std::string>& prefixes, std::int64_t in,
                                      std::int64_t out_of_each, bool bias, LoraColumns lora_columns) {
  const auto count = static_cast<std::int64_t>(prefixes.size());
  LinearSlot slot;
  if (lora_columns.count > 0) {
    slot = slot_with_lora_columns(count * out_of_each, in, lora_columns,
                                  at::TensorOptions(placement_.dtype).device(placement_.device));
    bytes_ += static_cast<std::int64_t>(lora_columns_of(slot).nbytes());
  }
  std::vector<at::Tensor> weights, biases;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::string& prefix = prefixes[static_cast<std::size_t>(i)];
    const at::Tensor weight = tensor(prefix + ".weight", {out_of_each, in});
    if (slot.wide.defined())
      slot.weight.narrow(0, i * out_of_each, out_of_each).copy_(weight);
    else
      weights.push_back(weight);
    if (bias) biases.push_back(tensor(prefix + ".bias", {out_of_each}));
  }
  if (!slot.wide.defined()) slot.weight = count == 1 ? weights.front() : at::cat(weights, 0);
  if (bias) slot.bias = count == 1 ? biases.front() : at::cat(biases, 0);
  return slot;
}

NormSlot Parameters::norm(const std::string& prefix, std::int64_t channels) {
  return {tensor(prefix + ".weight", {channels}), tensor(prefix + ".bias", {channels})};
}

ConvSlot Parameters::conv(const std::string& prefix, std::int64_t in, std::int64_t out, std::int64_t kernel) {
  return {tensor(prefix + ".weight", {out, in, kernel, kernel}), tensor(prefix + ".bias", {out})};
}

}  // namespace ditfleet::pipeline
