#include "pipeline/families/qwen_image/prompts.h"

#include <algorithm>

namespace ditfleet::pipeline {
namespace {

std::string system_chat(std::string_view system, std::string_view prompt) {
  return "<|im_start|>system\n" + std::string(system) + "<|im_end|>\n<|im_start|>user\n" + std::string(prompt) +
         "<|im_end|>\n<|im_start|>assistant\n";
}

}  // namespace

std::string qwen_image_chat(std::string_view prompt) {
  return system_chat(
      "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
      "objects and background:",
      prompt);
}

std::string qwen_edit_chat(std::string_view prompt, int pictures, bool numbered) {
  std::string message;
  for (int i = 1; i <= pictures; ++i) {
    if (numbered) message += "Picture " + std::to_string(i) + ": ";
    message += "<|vision_start|>" + std::string(kQwenImagePad) + "<|vision_end|>";
  }
  return system_chat(
      "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain "
      "how the user's text instruction should alter or modify the image. Generate a new image that meets the user's "
      "requirements while maintaining consistency with the original input where appropriate.",
      message + std::string(prompt));
}

Result<std::vector<std::int32_t>> expand_pictures(const std::vector<std::int32_t>& ids, std::int32_t placeholder,
                                                  const std::vector<std::int64_t>& tokens, int written) {
  if (std::count(ids.begin(), ids.end(), placeholder) != written)
    return Error{Code::kInvalidArgument,
                 "the prompt contains \"" + std::string(kQwenImagePad) + "\", which stands for a picture; remove it",
                 "prompt"};
  std::vector<std::int32_t> expanded;
  auto at = ids.begin();
  for (const std::int64_t count : tokens) {
    const auto picture = std::find(at, ids.end(), placeholder);
    expanded.insert(expanded.end(), at, picture);
    expanded.insert(expanded.end(), static_cast<std::size_t>(count), placeholder);
    expanded.push_back(picture[1]);  // <|vision_end|>
    at = picture + 2;
  }
  // The words before a picture are between two special tokens, so the others' ids do not depend on them.
  for (auto i = std::ssize(tokens); i < written; ++i) at = std::find(at, ids.end(), placeholder) + 2;
  expanded.insert(expanded.end(), at, ids.end());
  return expanded;
}

}  // namespace ditfleet::pipeline
