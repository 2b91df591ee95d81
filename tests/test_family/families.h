// A model family for tests: five frames of video from two networks that switch halfway, each with its own guidance
// scale. No program of the product knows it.
#pragma once

#include "pipeline/engine.h"
#include "shared/families/family.h"

namespace ditfleet::tests {

extern const families::Family kTestVideo;
const pipeline::Family& test_video_family();

}  // namespace ditfleet::tests
