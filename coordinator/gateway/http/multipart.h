// The body of a multipart/form-data request (RFC 7578). Pure functions, thread-safe.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shared/core/result.h"

namespace ditfleet::gateway {

struct FormPart {
  std::string name;
  bool is_file = false;       // the part has a file name
  std::string_view contents;  // points into the body
};

// The parts in order. kInvalidArgument: the Content-Type has no boundary, the body does not end with it, a part has no
// name, or there are more than 64 parts.
Result<std::vector<FormPart>> parse_form(std::string_view content_type, std::string_view body);

}  // namespace ditfleet::gateway
