#include "shared/telemetry/metrics_server.h"

#include <prometheus/exposer.h>

#include <exception>
#include <utility>

#include "shared/telemetry/metrics.h"

namespace ditfleet::telemetry {

struct MetricsServer::State {
  State(const std::string& listen, std::string host_name) : exposer(listen, 1), host(std::move(host_name)) {
    exposer.RegisterCollectable(metrics);
  }
  // The exposer wants shared ownership of what outlives everything.
  const std::shared_ptr<prometheus::Collectable> metrics{&registry(), [](prometheus::Collectable*) {}};
  prometheus::Exposer exposer;
  std::string host;
};

MetricsServer::MetricsServer(std::unique_ptr<State> state) : state_(std::move(state)) {}
MetricsServer::~MetricsServer() = default;

Result<std::unique_ptr<MetricsServer>> MetricsServer::start(const std::string& listen) {
  const auto colon = listen.rfind(':');
  if (colon == std::string::npos || colon == 0) return invalid_argument("'" + listen + "' is no address for metrics; it must be HOST:PORT, as 127.0.0.1:9464");
  try {
    return std::unique_ptr<MetricsServer>(new MetricsServer(std::make_unique<State>(listen, listen.substr(0, colon))));
  } catch (const std::exception& e) {
    return unavailable("cannot serve metrics on " + listen + ": " + e.what() + "; is the port in use?");
  }
}

std::string MetricsServer::url() const {
  const auto ports = state_->exposer.GetListeningPorts();
  return "http://" + state_->host + ":" + std::to_string(ports.empty() ? 0 : ports.front()) + "/metrics";
}

}  // namespace ditfleet::telemetry
