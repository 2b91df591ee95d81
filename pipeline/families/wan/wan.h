// Wan 2.1 and Wan 2.2 A14B, text to video.
#pragma once

#include "pipeline/engine.h"

namespace ditfleet::pipeline {

const Family& wan_family();

}  // namespace ditfleet::pipeline
