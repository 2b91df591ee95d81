// The coordinator process: HTTP gateway and scheduler on one thread, over Redis.
#pragma once

#include <functional>
#include <string>

#include "shared/config/settings.h"

namespace ditfleet {

// Called once, when GET /readyz first answers 200, with the URL for local clients ("http://127.0.0.1:8780").
// Runs on the coordinator's thread and must not block it.
using ReadyHook = std::function<void(const std::string& gateway_url)>;

// Serves until SIGTERM, SIGINT or SIGHUP, then shuts down cleanly: answers running requests, resigns as leader, closes.
// A second signal ends the process immediately. Redis may be down at startup. Until it is up, /healthz answers 200 and
// /readyz 503.
// Returns the process's exit status: 0, or 1 after logging the reason (an unreadable model folder, the port in use, a
// malformed Redis URL).
// Requires `settings.redis.url`. Blocks; call it once, from the main thread.
int run_coordinator(const config::Settings& settings, ReadyHook on_ready);

}  // namespace ditfleet
