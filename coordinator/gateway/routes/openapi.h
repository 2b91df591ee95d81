// The description of the API: openapi.json, with the request schemas filled from the table of fields (shared/job).
#pragma once

#include <string>

#include "shared/core/json.h"
#include "shared/job/fields.h"

namespace ditfleet::gateway {

// The JSON schema of a field's value.
json::object schema_of(const job::FieldRow& row);

// The description as JSON, generated at the first call. Thread-safe.
const std::string& openapi_document();

}  // namespace ditfleet::gateway
