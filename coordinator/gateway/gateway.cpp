#include "coordinator/gateway/gateway.h"

#include <utility>

#include "coordinator/gateway/events/event_hub.h"
#include "coordinator/gateway/http/http_metrics.h"
#include "coordinator/gateway/http/server.h"
#include "coordinator/gateway/job_service.h"
#include "coordinator/gateway/routes/api.h"
#include "shared/core/task_group.h"
#include "shared/redis/connection.h"

namespace ditfleet::gateway {
namespace {

ServerOptions server_options(const config::Settings& settings) {
  ServerOptions options;
  options.max_body_bytes = static_cast<std::uint64_t>(settings.gateway.max_body_bytes);
  options.max_connections = settings.gateway.max_connections;
  return options;
}

}  // namespace

class Gateway::Impl {
 public:
  Impl(asio::any_io_executor executor, GatewayDependencies dependencies)
      : service_(make_job_service(dependencies.queue, dependencies.store, dependencies.redis)),
        feed_(std::make_shared<queue::Feed>(dependencies.redis, dependencies.queue->options().shard, true)),
        hub_(std::make_shared<EventHub>(executor, [feed = feed_](auto block) { return feed->next(block); })),
        tasks_(executor),
        server_(executor, server_options(dependencies.settings),
                {.request = [this](Request request) { return api_->handle(std::move(request)); },
                 .refuse = [this](int status, const std::string& message,
                                  const std::string& code) { return api_->refuse(status, message, code); },
                 .streams = [this](const Request& head) { return api_->wants_stream(head); },
                 .count_connections = count_connections}),
        dependencies_(std::move(dependencies)) {}

  Result<void> listen() {
    if (auto listening = server_.listen(dependencies_.settings.gateway.listen); !listening) return listening;
    api_ = std::make_unique<Api>(std::move(dependencies_), *service_, hub_, url());
    return {};
  }

  int port() const { return server_.port(); }
  std::set<std::string> tenants() const { return api_->tenants(); }
  std::string url() const { return "http://" + server_.local_host() + ":" + std::to_string(server_.port()); }

  asio::awaitable<void> run() {
    tasks_.spawn("event hub", EventHub::run(hub_), Vital::kForever);
    tasks_.spawn("keys", api_->follow_keys(), Vital::kForever);
    co_await server_.run();
  }

  asio::awaitable<void> stop(Deadline deadline) {
    tasks_.stop();
    hub_->stop();
    co_await server_.stop(deadline);
    co_await tasks_.join();
  }

 private:
  std::unique_ptr<JobService> service_;
  std::shared_ptr<queue::Feed> feed_;
  std::shared_ptr<EventHub> hub_;
  std::unique_ptr<Api> api_;  // created by listen(), because it needs the URL; no request arrives earlier
  TaskGroup tasks_;
  Server server_;
  GatewayDependencies dependencies_;  // until listen()
};

Gateway::Gateway(asio::any_io_executor executor, GatewayDependencies dependencies)
    : impl_(std::make_unique<Impl>(std::move(executor), std::move(dependencies))) {}
Gateway::~Gateway() = default;
Result<void> Gateway::listen() { return impl_->listen(); }
int Gateway::port() const { return impl_->port(); }
std::set<std::string> Gateway::tenants() const { return impl_->tenants(); }
std::string Gateway::url() const { return impl_->url(); }
asio::awaitable<void> Gateway::run() { return impl_->run(); }
asio::awaitable<void> Gateway::stop(Deadline deadline) { return impl_->stop(deadline); }

}  // namespace ditfleet::gateway
