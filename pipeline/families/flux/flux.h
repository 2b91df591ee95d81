// The FLUX family: FLUX.1-dev and FLUX.1-schnell, text to image (diffusers FluxPipeline).
#pragma once

#include "pipeline/engine.h"

namespace ditfleet::pipeline {

const Family& flux_family();

}  // namespace ditfleet::pipeline
