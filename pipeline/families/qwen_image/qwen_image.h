// The Qwen-Image family: text to image, and edits of one or several pictures (diffusers QwenImagePipeline,
// QwenImageEditPipeline and QwenImageEditPlusPipeline).
#pragma once

#include "pipeline/engine.h"

namespace ditfleet::pipeline {

const Family& qwen_image_family();

}  // namespace ditfleet::pipeline
