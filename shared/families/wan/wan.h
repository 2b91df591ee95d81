// Wan 2.1 and 2.2, text and image to video: diffusers' WanPipeline and WanImageToVideoPipeline with one transformer, or
// with two and a boundary.
#pragma once

#include "shared/families/family.h"

namespace ditfleet::families {

extern const Family kWan;

}  // namespace ditfleet::families
