// Where this host listens: parsing HOST:PORT, trying it, and how a local client reaches it.
#pragma once

#include <string>

#include "shared/core/result.h"

namespace ditfleet::cli {

struct ListenAddress {
  std::string host;  // without brackets
  int port = 0;

  static Result<ListenAddress> parse(const std::string& text);
  std::string text() const;       // "127.0.0.1:8780", "[::1]:8780"
  std::string local_url() const;  // "http://127.0.0.1:8780", also for 0.0.0.0
};

// Binds the address for a moment; for port 0 the result has the port that was free. kUnavailable: it is in
// use or not allowed, kInvalidArgument: no such host.
Result<ListenAddress> try_to_listen(ListenAddress address);

}  // namespace ditfleet::cli
