// Boost.JSON, built once in json.cpp. Include this instead of <boost/json.hpp>.
#pragma once

#include <boost/json.hpp>
#include <string_view>

#include "shared/core/result.h"

namespace ditfleet {

namespace json = boost::json;

// Strict JSON, at most 64 levels deep. The message of kInvalidArgument has the position. The value is allocated in
// `storage`, which must outlive it (default: the heap).
Result<json::value> parse_json(std::string_view text, json::storage_ptr storage = {});

}  // namespace ditfleet
