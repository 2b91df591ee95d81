// Serves /metrics, /healthz and /readyz in processes without another HTTP server.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "shared/core/result.h"

namespace ditfleet::telemetry {

// Serves on separate threads until destruction. There is no TLS and no authentication, so listen on an address that
// only the scraper can reach.
class MetricsServer {
 public:
  // `listen` is HOST:PORT; port 0 selects a free port. `why_not_ready`: the answer of /readyz, or empty if the process
  // is ready; called on the server's threads. kInvalidArgument: not an address. kUnavailable: cannot listen.
  static Result<std::unique_ptr<MetricsServer>> start(const std::string& listen,
                                                      std::function<std::string()> why_not_ready = {});
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  std::string url() const;  // http://HOST:PORT/metrics, with the actual port

 private:
  struct State;
  explicit MetricsServer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ditfleet::telemetry
