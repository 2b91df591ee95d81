#include "pipeline/nn/run_state.h"

#include <ATen/ops/from_blob.h>

#include <optional>

#include "pipeline/device/failure.h"
#include "pipeline/nn/tensor_entries.h"
#include "shared/core/text.h"
#include "shared/safetensors/header.h"

namespace ditfleet::pipeline {
namespace {

[[noreturn]] void damaged(const std::string& what) { fail(Code::kDataCorrupt, "[state] the state of a run " + what); }

}  // namespace

RunState::RunState(std::string_view file, c10::Device device) : loads_(true) {
  const auto header = safetensors::parse_safetensors_header(file, "state");
  if (!header) damaged("is no safetensors file: " + header.error().message);
  numbers_ = header->metadata;
  for (const auto& entry : header->tensors) {
    const auto type = type_of_entry(entry.dtype);
    if (!type) damaged("has a tensor '" + entry.name + "' of another type");
    tensors_[entry.name] =
        at::from_blob(const_cast<char*>(file.data() + entry.begin), entry.shape, at::TensorOptions().dtype(*type))
            .clone()
            .to(device);
  }
}

void RunState::tensor(const std::string& name, at::Tensor& value) {
  if (!loads_) {
    if (!value.defined()) return;
    room_ -= static_cast<std::int64_t>(value.nbytes());
    if (room_ < 0) fail(Code::kPayloadTooLarge, "[state] the state of the run is too large to be kept");
    tensors_[name] = value.to(c10::DeviceType::CPU).contiguous();
    return;
  }
  const auto found = tensors_.find(name);
  value = found == tensors_.end() ? at::Tensor() : found->second;
}

void RunState::number(const std::string& name, std::int64_t& value) {
  if (!loads_) {
    numbers_[name] = std::to_string(value);
    return;
  }
  const auto found = numbers_.find(name);
  const auto number = found == numbers_.end() ? std::nullopt : number_of<std::int64_t>(found->second);
  if (!number) damaged("has no number '" + name + "'");
  value = *number;
}

std::string RunState::file() const { return unwrap(encode_safetensors(entries_of(tensors_), numbers_)); }

}  // namespace ditfleet::pipeline
