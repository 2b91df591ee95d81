// Checks the base URL of an HTTP service.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace ditfleet {

// Returns nothing if `url` is http:// or https:// with a host and an optional port. Otherwise returns the end of an
// error message ("has port '99999'; a port is a number from 1 to 65535"). It contains only the URL's scheme and port,
// because other parts may be secret. Thread-safe.
std::optional<std::string> http_url_problem(std::string_view url);

}  // namespace ditfleet
