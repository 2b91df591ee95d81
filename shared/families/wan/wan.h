// Wan 2.1 and Wan 2.2 A14B, text to video: diffusers' WanPipeline with one transformer, or with two and a boundary.
#pragma once

#include "shared/families/family.h"

namespace ditfleet::families {

extern const Family kWan;

}  // namespace ditfleet::families
