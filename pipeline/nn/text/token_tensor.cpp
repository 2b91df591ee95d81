#include "pipeline/nn/text/token_tensor.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "pipeline/device/failure.h"

namespace ditfleet::pipeline {

at::Tensor token_tensor(const std::vector<std::int32_t>& ids, std::int64_t vocab_size, c10::Device device,
                        const std::string& encoder) {
  for (auto id : ids)
    if (id < 0 || id >= vocab_size)
      fail(Code::kDataCorrupt, "[" + encoder + "] the tokenizer gives id " + std::to_string(id) +
                                   ", but vocab_size is " + std::to_string(vocab_size) +
                                   "; tokenizer and text encoder must come from one model");
  at::Tensor tensor = at::empty({1, static_cast<std::int64_t>(ids.size())}, c10::ScalarType::Long);
  std::copy(ids.begin(), ids.end(), tensor.mutable_data_ptr<std::int64_t>());
  return tensor.to(device);
}

}  // namespace ditfleet::pipeline
