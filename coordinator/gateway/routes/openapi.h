// The description of the API: openapi.json, with the request schemas filled from the table of fields (shared/job).
#pragma once

#include <string>

namespace ditfleet::gateway {

// JSON. Made once, at the first call; thread safe.
const std::string& openapi_document();

}  // namespace ditfleet::gateway
