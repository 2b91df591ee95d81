// The address of a server: HOST:PORT, and the URL for a client on the same host.
#pragma once

#include <string>
#include <string_view>

#include "shared/core/result.h"

namespace ditfleet {

struct ListenAddress {
  std::string host;  // without brackets
  int port = 0;      // 0: any free port

  // HOST:PORT, [IPv6]:PORT, :PORT or *:PORT; the last two mean every IPv4 interface, 0.0.0.0. Anything else is
  // kInvalidArgument with `option` as its param.
  static Result<ListenAddress> parse(std::string_view text, std::string_view option = {});

  std::string text() const;       // "127.0.0.1:8780", "[::1]:8780"
  std::string local_url() const;  // "http://127.0.0.1:8780", also for 0.0.0.0
};

}  // namespace ditfleet
