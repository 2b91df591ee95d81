// The texts around a prompt, and the tokens of pictures in it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shared/core/result.h"

namespace ditfleet::pipeline {

// What Qwen-Image's pipelines write around a prompt. They drop the first tokens of the text encoder's result, which are
// the system's message: kQwenImageDropped and kQwenEditDropped.
inline constexpr std::int64_t kQwenImageDropped = 34, kQwenEditDropped = 64;
std::string qwen_image_chat(std::string_view prompt);  // QwenImagePipeline
// `pictures`: the number before the prompt, each with a placeholder, kQwenImagePad. `numbered`: "Picture 1: " and so on
// precede them, as in QwenImageEditPlusPipeline; else as in QwenImageEditPipeline.
std::string qwen_edit_chat(std::string_view prompt, int pictures, bool numbered);
inline constexpr std::string_view kQwenImagePad = "<|image_pad|>";

// Repeats the i-th id `placeholder` of a text with `written` pictures tokens[i] times: one for each token of the
// picture. Takes the further pictures out, with the ids around them. kInvalidArgument: there is another number of
// placeholders, because the prompt has one. Precondition: 1 ≤ tokens.size() ≤ written.
Result<std::vector<std::int32_t>> expand_pictures(const std::vector<std::int32_t>& ids, std::int32_t placeholder,
                                                  const std::vector<std::int64_t>& tokens, int written);

}  // namespace ditfleet::pipeline
