// The Z-Image family: Z-Image-Turbo and Z-Image, text to image (diffusers ZImagePipeline).
#pragma once

#include "pipeline/engine.h"

namespace ditfleet::pipeline {

const Family& z_image_family();

}  // namespace ditfleet::pipeline
