#include "pipeline/models/parameters.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstring>
#include <optional>

#include "pipeline/device/failure.h"

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

// The view's bytes as a tensor on the host: borrowed where the address allows it, copied otherwise.
at::Tensor on_host(const TensorView& view, c10::ScalarType type, const Shape& shape) {
  const std::size_t size = c10::elementSize(type);
  void* bytes = const_cast<std::byte*>(view.bytes.data());
  const auto options = at::TensorOptions().dtype(type);
  if (reinterpret_cast<std::uintptr_t>(bytes) % size == 0) return at::from_blob(bytes, shape, options);
  at::Tensor copy = at::empty(shape, options);
  std::memcpy(copy.mutable_data_ptr(), bytes, view.bytes.size());
  return copy;
}

}  // namespace

at::Tensor copy_to(Placement placement, const TensorView& view) {
  const auto type = scalar_type(view.dtype);
  if (!type)
    fail(Code::kDataCorrupt, "tensor " + std::string(view.name) + " is of type " + std::string(dtype_name(view.dtype)) +
                                 "; weights must be F32, BF16, F16, F64 or F8");
  return on_host(view, *type, Shape(view.shape.begin(), view.shape.end()))
      .to(placement.device, placement.dtype, /*non_blocking=*/false, /*copy=*/true);
}

Parameters::Parameters(Checkpoint checkpoint, Placement placement)
    : checkpoint_(std::move(checkpoint)), placement_(placement) {}

Parameters Parameters::open(const std::string& dir, Placement placement) {
  return Parameters(unwrap(Checkpoint::open(dir)), placement);
}

at::Tensor Parameters::tensor(const std::string& name, const Shape& shape) {
  const TensorView view = unwrap(checkpoint_.tensor(name));
  if (!std::equal(view.shape.begin(), view.shape.end(), shape.begin(), shape.end()))
    fail(Code::kDataCorrupt, dir() + ": tensor " + name + " has shape " +
                                 shape_text(Shape(view.shape.begin(), view.shape.end())) + ", config.json says " +
                                 shape_text(shape));
  const auto type = scalar_type(view.dtype);
  if (!type)
    fail(Code::kDataCorrupt, dir() + ": tensor " + name + " is of type " + std::string(dtype_name(view.dtype)) +
                                 "; weights must be F32, BF16, F16, F64 or F8");
  at::Tensor out = on_host(view, *type, shape).to(placement_.device, placement_.dtype, /*non_blocking=*/false, /*copy=*/true);
  bytes_ += static_cast<std::int64_t>(out.nbytes());
  return out;
}

LinearSlot Parameters::linear(const std::string& prefix, std::int64_t in, std::int64_t out, bool bias) {
  LinearSlot slot;
  slot.weight = tensor(prefix + ".weight", {out, in});
  if (bias) slot.bias = tensor(prefix + ".bias", {out});
  return slot;
}

LinearSlot Parameters::stacked_linear(const std::vector<std::string>& prefixes, std::int64_t in,
                                      std::int64_t out_of_each, bool bias) {
  std::vector<at::Tensor> weights, biases;
  for (const auto& prefix : prefixes) {
    const LinearSlot one = linear(prefix, in, out_of_each, bias);
    weights.push_back(one.weight);
    if (bias) biases.push_back(one.bias);
  }
  LinearSlot slot;
  slot.weight = at::cat(weights, 0);
  if (bias) slot.bias = at::cat(biases, 0);
  return slot;
}

NormSlot Parameters::norm(const std::string& prefix, std::int64_t channels) {
  return {tensor(prefix + ".weight", {channels}), tensor(prefix + ".bias", {channels})};
}

ConvSlot Parameters::conv(const std::string& prefix, std::int64_t in, std::int64_t out, std::int64_t kernel) {
  return {tensor(prefix + ".weight", {out, in, kernel, kernel}), tensor(prefix + ".bias", {out})};
}

}  // namespace ditfleet::pipeline
