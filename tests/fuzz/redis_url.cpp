// libFuzzer: any text as the URL of a Redis. An accepted URL is written and read back unchanged. No message and no
// displayed form contains the password.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "shared/redis/endpoint.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using ditfleet::redis::Endpoint;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto endpoint = Endpoint::parse(text);
  if (!endpoint) {
    if (endpoint.error().message.empty()) std::abort();
    return 0;
  }
  const auto again = Endpoint::parse(endpoint->url());
  if (!again || again->url() != endpoint->url() || again->password != endpoint->password ||
      again->user != endpoint->user || again->host != endpoint->host || again->port != endpoint->port ||
      again->db != endpoint->db || again->tls != endpoint->tls || again->unix_path != endpoint->unix_path ||
      again->sentinels != endpoint->sentinels || again->service != endpoint->service)
    std::abort();
  Endpoint open = *endpoint;
  open.user.clear();
  open.password.clear();
  if (endpoint->display() != open.display()) std::abort();  // credentials change nothing in it
  return 0;
}
