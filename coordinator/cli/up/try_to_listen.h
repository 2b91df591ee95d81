// Whether this host can listen somewhere.
#pragma once

#include "shared/core/listen_address.h"

namespace ditfleet::cli {

// Binds the address for a moment; for port 0 the result has the port that was free. kUnavailable: it is in
// use or not allowed, kInvalidArgument: no such host.
Result<ListenAddress> try_to_listen(ListenAddress address);

}  // namespace ditfleet::cli
