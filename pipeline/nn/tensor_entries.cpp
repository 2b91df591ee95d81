#include "pipeline/nn/tensor_entries.h"

#include <utility>

#include "pipeline/device/failure.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::pair<c10::ScalarType, DType> kTypes[] = {{c10::ScalarType::Float, DType::kF32},
                                                        {c10::ScalarType::BFloat16, DType::kBF16},
                                                        {c10::ScalarType::Long, DType::kI64}};

DType stored_type(const std::string& name, c10::ScalarType type) {
  for (const auto& [scalar, stored] : kTypes)
    if (scalar == type) return stored;
  fail(Code::kInternal, "the tensor '" + name + "' has an unexpected type");
}

}  // namespace

std::vector<TensorToWrite> entries_of(const std::map<std::string, at::Tensor>& tensors) {
  std::vector<TensorToWrite> entries;
  for (const auto& [name, tensor] : tensors)
    entries.push_back({name,
                       stored_type(name, tensor.scalar_type()),
                       tensor.sizes().vec(),
                       {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()}});
  return entries;
}

std::optional<c10::ScalarType> type_of_entry(DType dtype) {
  for (const auto& [scalar, stored] : kTypes)
    if (stored == dtype) return scalar;
  return {};
}

}  // namespace ditfleet::pipeline
