// What a model generates: an image or a video.
#pragma once

#include "shared/media/media.h"

namespace ditfleet::pipeline {

using media::Media;

}  // namespace ditfleet::pipeline
