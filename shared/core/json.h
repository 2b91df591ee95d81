// Boost.JSON, built once in json.cpp. Include this instead of <boost/json.hpp>.
#pragma once

#include <boost/json.hpp>
#include <string_view>

#include "shared/core/result.h"

namespace ditfleet {

namespace json = boost::json;

// Parses strict JSON of at most 64 levels. kInvalidArgument: the message contains the position of the error. The value
// is allocated in `storage`, which must outlive the value; the default is the heap.
Result<json::value> parse_json(std::string_view text, json::storage_ptr storage = {});

}  // namespace ditfleet
