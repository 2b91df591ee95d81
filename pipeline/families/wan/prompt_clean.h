// The cleaning of prompts by diffusers' Wan pipelines: ftfy.fix_text, html.unescape twice, white space.
#pragma once

#include <string>

namespace ditfleet::pipeline {

// `prompt`: valid UTF-8. Repairs what ftfy 6.3 repairs, in its order: HTML entities, terminal escapes, C1 controls,
// ligatures, full and half width, curly quotes, line breaks, control characters, NFC. Mojibake (UTF-8 that was decoded
// as another encoding) stays as it is.
std::string prompt_clean(const std::string& prompt);

}  // namespace ditfleet::pipeline
