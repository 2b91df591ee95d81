// The error of a process that waited in vain for another one of its group: not the cause of a failure.
#pragma once

#include <string>
#include <utility>

#include "shared/core/error.h"

namespace ditfleet {

inline constexpr char kMissingPeer[] = "MISSINGPEER";

inline Error missing_peer(std::string message) {
  return {.code = Code::kUnavailable, .message = std::move(message), .kind = kMissingPeer};
}

inline bool is_missing_peer(const Error& error) { return error.kind == kMissingPeer; }

}  // namespace ditfleet
