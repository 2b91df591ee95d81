// The address that a server listens on: HOST:PORT.
#pragma once

#include <string>
#include <string_view>

#include "shared/core/result.h"

namespace ditfleet {

struct ListenAddress {
  std::string host;  // without brackets
  int port = 0;      // 0: any free port

  // Parses HOST:PORT, [IPv6]:PORT, :PORT or *:PORT. The last two mean 0.0.0.0, all IPv4 interfaces.
  // kInvalidArgument, with `option` as param.
  static Result<ListenAddress> parse(std::string_view text, std::string_view option = {});

  std::string text() const;                       // "127.0.0.1:8780", "[::1]:8780"
  std::string local_url(bool tls = false) const;  // for clients on this host: "http://127.0.0.1:8780", also for 0.0.0.0
};

// Whether `host`, in lower case and without brackets, is an IPv4 or IPv6 address, or is "localhost" or a loopback
// address.
bool is_ip_address(const std::string& host);
bool is_loopback(const std::string& host);

}  // namespace ditfleet
