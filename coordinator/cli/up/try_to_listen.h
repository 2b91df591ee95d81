// Checks that an address can be listened on.
#pragma once

#include "shared/core/listen_address.h"

namespace ditfleet::cli {

// Binds the address and closes it again. For port 0 the result contains a free port.
// Errors: kUnavailable (in use or not permitted), kInvalidArgument (unknown host).
Result<ListenAddress> try_to_listen(ListenAddress address);

}  // namespace ditfleet::cli
