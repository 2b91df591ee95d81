// FLUX.2 klein: diffusers' Flux2KleinPipeline, distilled to few steps or guided ("base").
#pragma once

#include "shared/families/family.h"

namespace ditfleet::families {

extern const Family kFlux2;

// Whether model_index.json says that the model computes the keys and values of references once.
bool caches_references(std::string_view class_name);

}  // namespace ditfleet::families
