// FLUX.2 klein: diffusers' Flux2KleinPipeline, distilled to few steps or guided ("base").
#pragma once

#include "shared/families/family.h"

namespace ditfleet::families {

extern const Family kFlux2;

}  // namespace ditfleet::families
