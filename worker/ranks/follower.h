// A rank other than 0 of a worker: a process without a mailbox, which does what rank 0 does.
#pragma once

#include "worker/ranks/leader.h"

namespace ditfleet::worker {

// Serves rank 0 until it closes the socket, and ends the process.
[[noreturn]] void follow(int socket, const pipeline::RankOptions& ranks, const EngineFactory& create);

}  // namespace ditfleet::worker
