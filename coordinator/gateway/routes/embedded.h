// Files embedded in the binary (embed.cmake).
#pragma once

#include <string_view>

namespace ditfleet::gateway {

extern const std::string_view kConsolePage;  // console.html
extern const std::string_view kOpenApiJson;  // openapi.json

}  // namespace ditfleet::gateway
