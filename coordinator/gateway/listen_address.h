// Where the gateway listens.
#pragma once

#include <string>

#include "shared/core/result.h"

namespace ditfleet::gateway {

struct ListenAddress {
  std::string host, port;  // as a resolver takes them
};

// HOST:PORT, [IPv6]:PORT, :PORT or *:PORT; port 0 picks one. kInvalidArgument for anything else.
Result<ListenAddress> parse_listen_address(const std::string& text);

}  // namespace ditfleet::gateway
