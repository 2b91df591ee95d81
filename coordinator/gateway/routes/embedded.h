// Files embedded in the binary (shared/build/embed.cmake).
#pragma once

#include <string_view>

namespace ditfleet::gateway {

// pages/
extern const std::string_view kConsolePage, kJobPage, kFleetPage, kSlowPage, kAlertsPage, kDocsPage, kPageStyle,
    kPageScript;
extern const std::string_view kAlertsText;   // deploy/observability/ALERTS.md
extern const std::string_view kOpenApiJson;  // openapi.json

}  // namespace ditfleet::gateway
