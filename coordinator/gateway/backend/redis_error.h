// Errors of Redis as clients see them.
#pragma once

#include <string>
#include <string_view>

#include "shared/core/error.h"

namespace ditfleet::gateway {

// Converts an error from Redis for a client: kUnavailable if Redis did not answer or rejected the call, because that is
// not the client's fault. Other errors are returned unchanged. `server`: "the queue's Redis (HOST:PORT)". `unanswered`,
// `full`: the advice if Redis did not answer or is out of memory.
Error redis_error(const Error& error, const std::string& server, std::string_view unanswered, std::string_view full);

}  // namespace ditfleet::gateway
