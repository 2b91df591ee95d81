// The process's metrics over HTTP, for processes that serve nothing else: GET /metrics.
#pragma once

#include <memory>
#include <string>

#include "shared/core/result.h"

namespace ditfleet::telemetry {

// Serves until it goes. Has threads of its own; scraping never touches the caller's. No TLS, no authentication:
// listen where only the scraper comes.
class MetricsServer {
 public:
  // `listen`: HOST:PORT; port 0 picks a free one. kInvalidArgument: it is none. kUnavailable: it cannot listen there.
  static Result<std::unique_ptr<MetricsServer>> start(const std::string& listen);
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  std::string url() const;  // http://HOST:PORT/metrics, with the port that was picked

 private:
  struct State;
  explicit MetricsServer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ditfleet::telemetry
