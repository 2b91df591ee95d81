// Takes the URL of an HTTP service apart. Pure functions, thread-safe.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace ditfleet {

// Parts of "https://user:password@host:443/path?query". They point into the URL.
struct HttpUrl {
  std::string_view scheme;     // "https"; empty if it is neither http nor https
  std::string_view user;       // "user:password"; may be empty, as the following parts
  std::string_view authority;  // "host:443"
  std::string_view host;       // without the brackets of an IPv6 address
  std::string_view port;       // ":443", unchecked
  std::string_view rest;       // "/path?query"
};

HttpUrl http_url_parts(std::string_view url);

// Returns nothing if `url` is http:// or https:// with a host and an optional port. Otherwise returns the end of an
// error message ("has port '99999'; a port is a number from 1 to 65535"). It contains only the URL's scheme and port,
// because other parts may be secret.
std::optional<std::string> http_url_problem(std::string_view url);

}  // namespace ditfleet
