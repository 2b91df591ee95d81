// The model families that this program serves.
#pragma once

#include "pipeline/engine.h"

namespace ditfleet::worker {

const pipeline::Families& families();

}  // namespace ditfleet::worker
