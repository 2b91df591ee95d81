#include "shared/core/listen_address.h"

#include <arpa/inet.h>

#include "shared/core/excerpt.h"
#include "shared/core/text.h"

namespace ditfleet {
namespace {

// Without the brackets of [IPv6]; empty: no host.
std::string_view host_of(std::string_view text) {
  if (text.empty() || text == "*") return "0.0.0.0";
  if (text.find_first_of(" /") != std::string_view::npos) return {};
  if (text.size() > 2 && text.front() == '[' && text.back() == ']') return text.substr(1, text.size() - 2);
  return text.find_first_of(":[]") == std::string_view::npos ? text : std::string_view();
}

}  // namespace

Result<ListenAddress> ListenAddress::parse(std::string_view text, std::string_view option) {
  const auto colon = text.rfind(':');
  ListenAddress address;
  if (colon != std::string_view::npos) {
    address.port = number_of(text.substr(colon + 1), 0, 65535).value_or(-1);
    address.host = host_of(text.substr(0, colon));
  }
  if (address.host.empty() || address.port < 0) {
    return invalid_argument("'" + excerpt(text, 128) +
                                "' is not an address to listen on; write HOST:PORT, such as 127.0.0.1:8780 "
                                "or [::1]:8780 (port 0 picks one)",
                            std::string(option));
  }
  return address;
}

std::string ListenAddress::text() const {
  const bool v6 = host.find(':') != std::string::npos;
  return (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

std::string ListenAddress::local_url(bool tls) const {
  ListenAddress local = *this;
  if (host == "0.0.0.0") local.host = "127.0.0.1";
  if (host == "::") local.host = "::1";
  return (tls ? "https://" : "http://") + local.text();
}

bool is_ip_address(const std::string& host) {
  in6_addr ignored;
  return ::inet_pton(AF_INET, host.c_str(), &ignored) == 1 || ::inet_pton(AF_INET6, host.c_str(), &ignored) == 1;
}

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || (host.starts_with("127.") && is_ip_address(host));
}

}  // namespace ditfleet
