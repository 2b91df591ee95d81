#include "pipeline/engine/dump.h"

#include <ATen/ops/from_blob.h>

#include "pipeline/device/failure.h"
#include "pipeline/weights/safetensors_writer.h"

namespace ditfleet::pipeline {
namespace {

DType stored_type(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Float: return DType::kF32;
    case c10::ScalarType::BFloat16: return DType::kBF16;
    case c10::ScalarType::Long: return DType::kI64;
    default: fail(Code::kInternal, "[dump] a tensor of an unexpected type");
  }
}

}  // namespace

void Dump::add(const std::string& name, const at::Tensor& tensor) {
  if (tensor.defined()) tensors_.emplace_back(name, tensor.to(c10::DeviceType::CPU).contiguous());
}

void Dump::add(const std::string& name, const std::vector<float>& values) {
  const auto n = static_cast<std::int64_t>(values.size());
  add(name, at::from_blob(const_cast<float*>(values.data()), {n}).clone());
}

void Dump::add(const std::string& name, const std::vector<std::int32_t>& ids) {
  const auto n = static_cast<std::int64_t>(ids.size());
  const auto options = at::TensorOptions().dtype(c10::ScalarType::Int);
  add(name, at::from_blob(const_cast<std::int32_t*>(ids.data()), {1, n}, options).to(c10::ScalarType::Long));
}

Result<void> Dump::write(const std::string& path, const std::map<std::string, std::string>& metadata) const {
  std::vector<TensorToWrite> entries;
  for (const auto& [name, t] : tensors_)
    entries.push_back({name,
                       stored_type(t.scalar_type()),
                       {t.sizes().begin(), t.sizes().end()},
                       {static_cast<const std::byte*>(t.const_data_ptr()), t.nbytes()}});
  return write_safetensors(path, std::move(entries), metadata);
}

}  // namespace ditfleet::pipeline
