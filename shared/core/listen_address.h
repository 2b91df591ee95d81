// Where a server listens: HOST:PORT as people write it, and how a client on the same host reaches it.
#pragma once

#include <string>
#include <string_view>

#include "shared/core/result.h"

namespace ditfleet {

struct ListenAddress {
  std::string host;  // as a resolver takes it: without brackets
  int port = 0;      // 0: any free one

  // HOST:PORT, [IPv6]:PORT, :PORT or *:PORT; the last two are every IPv4 interface, 0.0.0.0. kInvalidArgument
  // for anything else, with `option` as its param.
  static Result<ListenAddress> parse(std::string_view text, std::string_view option = {});

  std::string text() const;       // "127.0.0.1:8780", "[::1]:8780"
  std::string local_url() const;  // "http://127.0.0.1:8780", also for 0.0.0.0
};

}  // namespace ditfleet
