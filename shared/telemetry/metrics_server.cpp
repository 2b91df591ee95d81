#include "shared/telemetry/metrics_server.h"

#include <civetweb.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "shared/core/listen_address.h"
#include "shared/telemetry/metrics.h"

namespace ditfleet::telemetry {
namespace {

int answer(mg_connection* connection, int status, const std::string& body) {
  mg_response_header_start(connection, status);
  mg_response_header_add(connection, "Content-Type", "text/plain; version=0.0.4; charset=utf-8", -1);
  mg_response_header_add(connection, "Content-Length", std::to_string(body.size()).c_str(), -1);
  mg_response_header_send(connection);
  mg_write(connection, body.data(), body.size());
  return status;
}

}  // namespace

struct MetricsServer::State {
  State(std::function<std::string()> why, ListenAddress listen)
      : why_not_ready(std::move(why)), address(std::move(listen)) {}
  State(const State&) = delete;
  ~State() {
    if (context) mg_stop(context);  // waits for the requests
  }
  void serve(const char* path, mg_request_handler handler) { mg_set_request_handler(context, path, handler, this); }

  const std::function<std::string()> why_not_ready;
  const ListenAddress address;
  mg_context* context = nullptr;
};

MetricsServer::MetricsServer(std::unique_ptr<State> state) : state_(std::move(state)) {}
MetricsServer::~MetricsServer() = default;

Result<std::unique_ptr<MetricsServer>> MetricsServer::start(const std::string& listen,
                                                            std::function<std::string()> why_not_ready) {
  const auto address = ListenAddress::parse(listen, "worker.metrics_listen");
  if (!address) return address.error();
  auto state = std::make_unique<State>(std::move(why_not_ready), *address);
  const std::string text = address->text();
  // Each connection occupies a thread, even an idle one that a browser opened in advance. With one thread it would
  // block scrapes.
  std::array<const char*, 7> options{"listening_ports",    text.c_str(), "num_threads", "8",
                                     "request_timeout_ms", "2000",       nullptr};
  mg_callbacks callbacks{};
  callbacks.log_message = [](const mg_connection*, const char*) { return 1; };  // not to stderr
  errno = 0;
  state->context = mg_start(&callbacks, nullptr, options.data());
  if (!state->context && errno == EADDRINUSE)
    return unavailable(text + " is in use; set worker.metrics_listen to another address");
  if (!state->context)
    return unavailable("cannot serve metrics on " + text + ": " + std::strerror(errno ? errno : EADDRNOTAVAIL) +
                       "; set worker.metrics_listen to an address of this host");
  state->serve("/metrics$", [](mg_connection* connection, void*) { return answer(connection, 200, render_metrics()); });
  state->serve("/healthz$", [](mg_connection* connection, void*) { return answer(connection, 200, "alive\n"); });
  state->serve("/readyz$", [](mg_connection* connection, void* server) {
    const auto& check = static_cast<State*>(server)->why_not_ready;
    const std::string why = check ? check() : "";
    return why.empty() ? answer(connection, 200, "ready\n") : answer(connection, 503, why + "\n");
  });
  return std::unique_ptr<MetricsServer>(new MetricsServer(std::move(state)));
}

std::string MetricsServer::url() const {
  ListenAddress own = state_->address;
  mg_server_port port{};
  own.port = mg_get_server_ports(state_->context, 1, &port) == 1 ? port.port : 0;
  return own.local_url() + "/metrics";
}

}  // namespace ditfleet::telemetry
