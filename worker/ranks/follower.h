// A rank other than 0 of a worker: a process without a mailbox, which does what rank 0 does.
#pragma once

#include "worker/ranks/leader.h"

namespace ditfleet::worker {

class PulseMemory;

// Serves rank 0 until it closes the socket, and ends the process. Kills rank 0, its parent, if that is silent
// (pulse.h).
[[noreturn]] void follow(int socket, const pipeline::RankOptions& ranks, const EngineFactory& create,
                         std::shared_ptr<PulseMemory> pulses);

}  // namespace ditfleet::worker
