// GET /metrics for processes without another HTTP server.
#pragma once

#include <memory>
#include <string>

#include "shared/core/result.h"

namespace ditfleet::telemetry {

// Serves until it is destroyed, from threads of its own. No TLS and no authentication: listen on an address that only
// the scraper can reach.
class MetricsServer {
 public:
  // `listen`: HOST:PORT; port 0 picks a free one. kInvalidArgument: not an address. kUnavailable: cannot listen there.
  static Result<std::unique_ptr<MetricsServer>> start(const std::string& listen);
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
