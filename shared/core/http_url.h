// Checks the base URL of an HTTP service.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace ditfleet {

// Nothing if `url` is http:// or https:// with a host or an address and an optional port. Otherwise the end of a
// sentence about it ("has port '99999'; a port is a number from 1 to 65535"). It repeats only scheme and port, because
// the URL may contain a user and a password. Thread-safe.
std::optional<std::string> http_url_problem(std::string_view url);

}  // namespace ditfleet
