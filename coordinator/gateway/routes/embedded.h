// Files embedded in the binary (embed.cmake).
#pragma once

#include <string_view>

namespace ditfleet::gateway {

// pages/
extern const std::string_view kConsolePage, kJobPage, kFleetPage, kSlowPage, kPageStyle, kPageScript;
extern const std::string_view kOpenApiJson;  // openapi.json

}  // namespace ditfleet::gateway
