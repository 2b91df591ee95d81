#include "shared/core/http_url.h"

#include "shared/core/excerpt.h"
#include "shared/core/text.h"

namespace ditfleet {

std::optional<std::string> http_url_problem(std::string_view url) {
  const std::string_view scheme = url.starts_with("http://")    ? "http://"
                                  : url.starts_with("https://") ? "https://"
                                                                : "";
  if (scheme.empty()) return "begins with neither http:// nor https://";
  std::string_view host = url.substr(scheme.size());
  host = host.substr(0, host.find_first_of("/?#"));
  if (const auto at = host.rfind('@'); at != std::string_view::npos) host.remove_prefix(at + 1);
  std::string_view port;
  if (host.starts_with('[')) {  // an IPv6 address
    const auto close = host.find(']');
    if (close == std::string_view::npos) return "has an address without its closing ]";
    port = host.substr(close + 1);
    host = host.substr(1, close - 1);
  } else if (const auto colon = host.find(':'); colon != std::string_view::npos) {
    port = host.substr(colon);
    host = host.substr(0, colon);
  }
  if (host.empty()) return "has no host";
  if (host.find_first_of(" \t\r\n") != std::string_view::npos) return "has a space in its host";
  if (port.empty()) return std::nullopt;
  const bool colon = port.starts_with(':');
  if (colon) port.remove_prefix(1);
  if (colon && number_of(port, 1, 65535)) return std::nullopt;
  return "has port '" + excerpt(port, 64) + "'; a port is a number from 1 to 65535";
}

}  // namespace ditfleet
