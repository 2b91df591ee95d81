// The coordinator process: HTTP gateway and scheduler on one thread, over Redis.
#pragma once

#include <functional>
#include <string>

#include "shared/config/settings.h"

namespace ditfleet {

// Told once, when GET /readyz first answers 200: where a local client reaches the gateway
// ("http://127.0.0.1:8780"). Runs on the coordinator's thread and must not block it.
using ReadyHook = std::function<void(const std::string& gateway_url)>;

// Serves until SIGTERM or SIGINT, then ends cleanly: answers what runs, gives up the leadership, closes.
// A second signal ends it at once. Returns the process's exit status: 0, or 1 with the reason logged (a
// model folder that can't be read, the port in use, a malformed Redis URL). Redis being away is no reason:
// the gateway is alive (/healthz) and not ready (/readyz 503) until it comes.
// Needs `settings.redis.url`. Blocks; call it from the main thread, once.
int run_coordinator(const config::Settings& settings, ReadyHook on_ready);

}  // namespace ditfleet
