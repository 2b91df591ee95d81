// Converts token ids to a tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ditfleet::pipeline {

// Returns [1, ids.size()] int64 on the device. Throws Failure (kDataCorrupt) for an id outside the vocabulary:
// tokenizer and encoder do not belong together, and the embedding would be read out of bounds. `encoder` is for the
// message.
at::Tensor token_tensor(const std::vector<std::int32_t>& ids, std::int64_t vocab_size, c10::Device device,
                        const std::string& encoder);

}  // namespace ditfleet::pipeline
