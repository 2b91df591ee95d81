// The base URL of an HTTP service, as people write it: what can be said of it before anything is sent there.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace ditfleet {

// What is wrong with `url`, as the end of a sentence that names it ("has port '99999'; a port is a number from 1 to
// 65535"); empty: it is http:// or https://, a host or an address, and a port or none. Never repeats more than scheme
// and port, as a user and a password may stand before the host. Thread safe.
std::optional<std::string> http_url_problem(std::string_view url);

}  // namespace ditfleet
