// Z-Image: diffusers' ZImagePipeline, with few steps ("turbo") or guided.
#pragma once

#include "shared/families/family.h"

namespace ditfleet::families {

extern const Family kZImage;

}  // namespace ditfleet::families
