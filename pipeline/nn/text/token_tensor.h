// Token ids as an encoder takes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ditfleet::pipeline {

// [1, ids.size()] int64 on the device. Throws Failure (kDataCorrupt) for an id outside the vocabulary, which
// would read past the embedding: tokenizer and encoder do not belong together. `encoder` is for the message.
at::Tensor token_tensor(const std::vector<std::int32_t>& ids, std::int64_t vocab_size, c10::Device device,
                        const std::string& encoder);

}  // namespace ditfleet::pipeline
