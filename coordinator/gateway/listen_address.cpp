#include "coordinator/gateway/listen_address.h"

#include <charconv>

namespace ditfleet::gateway {

Result<ListenAddress> parse_listen_address(const std::string& text) {
  const auto colon = text.rfind(':');
  int port = -1;
  if (colon != std::string::npos) {
    const auto [end, ec] = std::from_chars(text.data() + colon + 1, text.data() + text.size(), port);
    if (ec != std::errc() || end != text.data() + text.size()) port = -1;
  }
  if (port < 0 || port > 65535) {
    return invalid_argument("'" + text + "' is not an address to listen on; write HOST:PORT, such as 127.0.0.1:8780 (port 0 picks one)", "gateway.listen");
  }
  std::string host = text.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  if (host.empty() || host == "*") host = "0.0.0.0";
  return ListenAddress{host, std::to_string(port)};
}

}  // namespace ditfleet::gateway
