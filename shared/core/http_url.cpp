#include "shared/core/http_url.h"

#include "shared/core/excerpt.h"
#include "shared/core/text.h"

namespace ditfleet {

HttpUrl http_url_parts(std::string_view url) {
  HttpUrl parts;
  for (const std::string_view scheme : {"http", "https"})
    if (url.starts_with(scheme) && url.substr(scheme.size()).starts_with("://")) parts.scheme = scheme;
  if (parts.scheme.empty()) return parts;
  url.remove_prefix(parts.scheme.size() + 3);
  parts.authority = url.substr(0, url.find_first_of("/?#"));
  parts.rest = url.substr(parts.authority.size());
  if (const auto at = parts.authority.rfind('@'); at != std::string_view::npos) {
    parts.user = parts.authority.substr(0, at);
    parts.authority.remove_prefix(at + 1);
  }
  const bool v6 = parts.authority.starts_with('[');
  parts.host = v6 ? parts.authority.substr(1, parts.authority.find(']') - 1)
                  : parts.authority.substr(0, parts.authority.find(':'));
  parts.port = parts.authority.substr(std::min(parts.authority.size(), parts.host.size() + (v6 ? 2 : 0)));
  return parts;
}

std::optional<std::string> http_url_problem(std::string_view url) {
  auto [scheme, user, authority, host, port, rest] = http_url_parts(url);
  if (scheme.empty()) return "begins with neither http:// nor https://";
  if (authority.starts_with('[') && authority.find(']') == std::string_view::npos)
    return "has an address without its closing ]";
  if (host.empty()) return "has no host";
  if (host.find_first_of(" \t\r\n") != std::string_view::npos) return "has a space in its host";
  if (port.empty()) return std::nullopt;
  const bool colon = port.starts_with(':');
  if (colon) port.remove_prefix(1);
  if (colon && number_of(port, 1, 65535)) return std::nullopt;
  return "has port '" + excerpt(port, 64) + "'; a port is a number from 1 to 65535";
}

}  // namespace ditfleet
