#include "coordinator/gateway/gateway.h"

#include <spdlog/spdlog.h>

#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <utility>

#include "coordinator/gateway/backend/job_service.h"
#include "coordinator/gateway/events/event_hub.h"
#include "coordinator/gateway/http/server.h"
#include "coordinator/gateway/routes/api.h"
#include "shared/core/task_group.h"
#include "shared/core/wall_clock.h"
#include "shared/redis/connection.h"
#include "shared/telemetry/metrics_server.h"

namespace ditfleet::gateway {
namespace {

ServerOptions server_options(const config::Settings& settings) {
  ServerOptions options;
  options.max_body_bytes = static_cast<std::uint64_t>(settings.gateway.max_body_bytes);
  options.max_connections = settings.gateway.max_connections;
  options.max_connections_per_peer = settings.gateway.max_connections_per_peer;
  options.tls_cert_file = settings.gateway.tls_cert_file;
  options.tls_key_file = settings.gateway.tls_key_file;
  return options;
}

class HttpGateway final : public Gateway {
 public:
  HttpGateway(asio::any_io_executor executor, GatewayDependencies dependencies)
      : service_(make_job_service(dependencies.queue, dependencies.store, dependencies.redis, dependencies.settings)),
        feed_(std::make_shared<queue::Feed>(dependencies.redis, dependencies.queue->options().shard, true)),
        hub_(std::make_shared<EventHub>(
            executor, [feed = feed_](auto block) { return feed->next(block); },
            [queue = dependencies.queue] { return queue->open_units(std::chrono::seconds(1)); })),
        tasks_(executor),
        server_(make_server(executor, server_options(dependencies.settings),
                            {.request = [this](Request request) { return api_->handle(std::move(request)); },
                             .refuse = [this](int status, const std::string& message,
                                              const std::string& code) { return api_->refuse(status, message, code); },
                             .refuse_head = [this](const Request& head) { return api_->refuse_head(head); },
                             .is_vital = [this](const Request& head) { return api_->is_vital(head); },
                             .streams = [this](const Request& head) { return api_->wants_stream(head); }})),
        dependencies_(std::move(dependencies)) {}

  Result<void> listen() override {
    const auto& gateway = dependencies_.settings.gateway;
    if (auto good = config::check_gateway(dependencies_.settings); !good) return good;
    if (!gateway.metrics_listen.empty()) {
      auto metrics = telemetry::MetricsServer::start(gateway.metrics_listen);
      if (!metrics) return metrics.error();
      metrics_ = std::move(*metrics);
      spdlog::info("metrics: {}", metrics_->url());
    }
    if (auto listening = server_->listen(gateway.listen); !listening) return listening;
    api_ = std::make_unique<Api>(std::move(dependencies_), *service_, hub_, url());
    return {};
  }

  const std::set<std::string>& tenants() const override { return api_->tenants(); }
  std::string url() const override { return server_->local_url(); }
  bool knows_keys() const override { return api_->knows_keys(); }
  bool hears() const override { return feed_->hears(); }

  asio::awaitable<void> run() override {
    tasks_.spawn("event hub", EventHub::run(hub_), Vital::kForever);
    tasks_.spawn("keys", api_->follow_keys(), Vital::kForever);
    tasks_.spawn("webhooks", api_->deliverer().run(), Vital::kForever);
    tasks_.spawn("maintenance", maintain(), Vital::kForever);
    tasks_.spawn("sweep of results", sweep_results(), Vital::kForever);
    tasks_.spawn("link secrets", learn_link_secrets(), Vital::kForever);
    co_await server_->run();
  }

  asio::awaitable<void> stop(Deadline deadline) override {
    tasks_.stop();
    hub_->stop();
    co_await api_->deliverer().stop();
    co_await server_->stop(deadline);
    co_await tasks_.join();
  }

 private:
  asio::awaitable<void> maintain() {
    asio::steady_timer timer(co_await asio::this_coro::executor);
    for (int second = 0;; ++second) {
      co_await service_->maintain();
      if (second % 15 == 0) co_await api_->export_usage();
      timer.expires_after(std::chrono::seconds(1));
      co_await timer.async_wait(asio::use_awaitable);
    }
  }

  asio::awaitable<void> sweep_results() {
    asio::steady_timer timer(co_await asio::this_coro::executor);
    for (;;) {
      co_await service_->sweep_results();
      timer.expires_after(std::chrono::seconds(1));
      co_await timer.async_wait(asio::use_awaitable);
    }
  }

  // Keeps the secrets of all links that may still be valid. A secret that an operator deletes is replaced within a
  // minute, which revokes its links.
  asio::awaitable<void> learn_link_secrets() {
    asio::steady_timer timer(co_await asio::this_coro::executor);
    const std::int64_t life_s = api_->link_life_s();
    for (;;) {
      const std::int64_t now = LinkSigner::id_at(unix_ms() / 1000);
      bool all = true;
      for (std::int64_t id = now - life_s / LinkSigner::kPeriodS - 1; id <= now; ++id) {
        auto secret = co_await service_->link_secret(id, life_s + 2 * LinkSigner::kPeriodS);
        if (secret) api_->signer().learn(id, std::move(*secret));
        all = all && secret.ok();
      }
      timer.expires_after(std::chrono::seconds(all ? 60 : 1));
      co_await timer.async_wait(asio::use_awaitable);
    }
  }

  std::unique_ptr<JobService> service_;
  std::shared_ptr<queue::Feed> feed_;
  std::shared_ptr<EventHub> hub_;
  std::unique_ptr<telemetry::MetricsServer> metrics_;
  std::unique_ptr<Api> api_;  // created by listen(), because it needs the URL; no request arrives earlier
  TaskGroup tasks_;
  std::shared_ptr<Server> server_;
  GatewayDependencies dependencies_;  // until listen()
};

}  // namespace

std::unique_ptr<Gateway> make_gateway(asio::any_io_executor executor, GatewayDependencies dependencies) {
  return std::make_unique<HttpGateway>(std::move(executor), std::move(dependencies));
}

}  // namespace ditfleet::gateway
