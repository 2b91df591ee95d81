// Wan 2.1 and 2.2, text and image to video.
#pragma once

#include "pipeline/engine.h"

namespace ditfleet::pipeline {

const Family& wan_family();

}  // namespace ditfleet::pipeline
