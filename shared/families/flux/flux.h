// FLUX.1: diffusers' FluxPipeline, guidance-distilled ("dev") or timestep-distilled ("schnell"). Folders of its
// pipelines for image input serve text to image.
#pragma once

#include "shared/families/family.h"

namespace ditfleet::families {

extern const Family kFlux;

}  // namespace ditfleet::families
