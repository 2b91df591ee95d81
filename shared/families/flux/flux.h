// FLUX.1: diffusers' FluxPipeline, guidance-distilled ("dev") or timestep-distilled ("schnell"). Folders of its
// pipelines for image to image and for inpainting are the same; FLUX.1 Kontext edits a picture.
#pragma once

#include "shared/families/family.h"

namespace ditfleet::families {

extern const Family kFlux;

// Whether model_index.json says that the folder is FLUX.1 Kontext.
bool is_flux_kontext(std::string_view class_name);

}  // namespace ditfleet::families
