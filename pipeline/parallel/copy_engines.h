// Exchanges of GPU ranks by copy engines: no kernel, so nothing runs on the multiprocessors. The ranks map each other's
// memory through CUDA IPC; flags are in host memory, where a process can still read and end them when a GPU hangs.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "pipeline/parallel/exchange.h"

namespace ditfleet::pipeline::parallel {

// All ranks of `host` call it, each with its GPU, which load_device() has opened and which is current. Exchanges some
// rows to see that they arrive; takes milliseconds. The exchange may be destroyed when no rank sends any more.
// Errors: kUnavailable, in all ranks with the same message, which says why in which rank: no access between two GPUs,
// no CUDA IPC in this container, an old driver. If a rank is missing, the error is_missing_peer() and the group has
// failed.
Result<std::unique_ptr<Exchange>> open_copy_engines(HostGroup& host, c10::Device device);

}  // namespace ditfleet::pipeline::parallel
