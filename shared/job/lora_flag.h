// An adapter as both programs take it on the command line: NAME, or NAME:SCALE. Pure, thread safe.
#pragma once

#include <optional>
#include <string_view>

#include "shared/job/spec.h"

namespace ditfleet::job {

// What stands behind the last colon is the scale: nothing if that is no number from -100 to 100. Without a colon it
// is 1.
std::optional<LoraUse> parse_lora_flag(std::string_view text);

}  // namespace ditfleet::job
