#include "shared/telemetry/metrics_server.h"

#include <prometheus/exposer.h>

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "shared/core/listen_address.h"
#include "shared/telemetry/metrics.h"

namespace ditfleet::telemetry {

namespace {

// Each connection occupies a thread, even an idle one that a browser opened in advance. With one thread it would block
// scrapes.
std::vector<std::string> exposer_options(const std::string& listen) {
  return {"listening_ports", listen, "num_threads", "8", "request_timeout_ms", "2000"};
}

}  // namespace

struct MetricsServer::State {
  explicit State(ListenAddress listen) : exposer(exposer_options(listen.text())), address(std::move(listen)) {
    exposer.RegisterCollectable(metrics);
  }
  // The exposer requires a shared_ptr, but the registry outlives it.
  const std::shared_ptr<prometheus::Collectable> metrics{&registry(), [](prometheus::Collectable*) {}};
  prometheus::Exposer exposer;
  ListenAddress address;
};

MetricsServer::MetricsServer(std::unique_ptr<State> state) : state_(std::move(state)) {}
MetricsServer::~MetricsServer() = default;

Result<std::unique_ptr<MetricsServer>> MetricsServer::start(const std::string& listen) {
  const auto address = ListenAddress::parse(listen, "worker.metrics_listen");
  if (!address) return address.error();
  try {
    return std::unique_ptr<MetricsServer>(new MetricsServer(std::make_unique<State>(*address)));
  } catch (const std::exception& e) {
    return unavailable("cannot serve metrics on " + listen + ": " + e.what() + "; is the port in use?");
  }
}

std::string MetricsServer::url() const {
  ListenAddress own = state_->address;
  const auto ports = state_->exposer.GetListeningPorts();
  own.port = ports.empty() ? 0 : ports.front();
  return own.local_url() + "/metrics";
}

}  // namespace ditfleet::telemetry
