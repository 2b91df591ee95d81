// The named character references of HTML: html_entities.txt, embedded in the binary (shared/build/embed.cmake).
#pragma once

#include <string_view>

namespace ditfleet::pipeline {

extern const std::string_view kHtmlEntities;

}  // namespace ditfleet::pipeline
