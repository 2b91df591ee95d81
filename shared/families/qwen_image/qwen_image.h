// Qwen-Image: diffusers' QwenImagePipeline, QwenImageEditPipeline and QwenImageEditPlusPipeline.
#pragma once

#include "shared/families/family.h"

namespace ditfleet::families {

extern const Family kQwenImage;

// By the _class_name in model_index.json: kEdit takes one picture, kEditPlus several.
enum class QwenImageKind { kText, kEdit, kEditPlus };
QwenImageKind qwen_image_kind(std::string_view class_name);
inline constexpr int kMostQwenPictures = 3;

}  // namespace ditfleet::families
