// The FLUX.2 family: FLUX.2 klein, distilled and base, text to image (diffusers Flux2KleinPipeline).
#pragma once

#include "pipeline/engine.h"

namespace ditfleet::pipeline {

const Family& flux2_family();

}  // namespace ditfleet::pipeline
