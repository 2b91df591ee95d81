#include "coordinator/service.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <cmath>
#include <csignal>
#include <memory>

#include "coordinator/gateway/gateway.h"
#include "coordinator/scheduling/service/scheduler_service.h"
#include "shared/core/host_name.h"
#include "shared/core/ids.h"
#include "shared/core/stop_signals.h"
#include "shared/core/task_group.h"
#include "shared/families/served.h"
#include "shared/job/catalogue.h"
#include "shared/loras/registry.h"
#include "shared/loras/registry_mirror.h"
#include "shared/queue/client.h"
#include "shared/redis/connection.h"
#include "shared/results/store.h"
#include "shared/telemetry/log.h"
#include "shared/telemetry/otlp.h"
#include "shared/telemetry/turns.h"

namespace ditfleet {
namespace {

using namespace std::chrono_literals;

constexpr auto kGatewayStop = 10s;
constexpr auto kSchedulerStop = 2s;
constexpr auto kReadyPoll = 20ms;

Result<job::Catalogue> read_catalogue(const config::Settings& settings) {
  job::Catalogue out;
  for (const auto& [name, model] : settings.models) {
    auto entry = families::read_model_entry(name, model.path, families::served());
    if (!entry) return entry.error();
    out.models.emplace(name, std::move(entry).value());
  }
  for (const families::Family* family : families::served())
    out.adapter_parts[std::string(family->name)] = family->adapter_parts;
  out.default_model = settings.default_model;
  if (out.default_model.empty() && out.models.size() == 1) out.default_model = out.models.begin()->first;
  if (!out.default_model.empty() && !out.models.contains(out.default_model)) {
    return invalid_argument(fmt::format("default_model is '{}', but no model has this name", out.default_model));
  }
  return out;
}

scheduling::SchedulerServiceOptions scheduler_options(const config::Settings& settings,
                                                      const job::Catalogue& catalogue) {
  scheduling::SchedulerServiceOptions out;
  // Unique per start: a restarted coordinator must not inherit a leadership whose state it has lost.
  out.coordinator = fmt::format("{}-{}-{}", host_name(), getpid(), new_nonce().substr(0, 8));
  out.leader_ttl_ms = settings.scheduler.leader_ttl_ms;
  out.allow_eviction = settings.redis.allow_eviction;
  out.scheduler.catalogue = catalogue;
  out.scheduler.precision = settings.worker.dtype;
  for (const auto& [name, tenant] : settings.tenants) out.scheduler.weights.emplace(name, tenant.weight);
  out.scheduler.lookahead = settings.scheduler.lookahead;
  out.scheduler.age_bound_ms = settings.scheduler.age_bound_ms;
  out.scheduler.refuse_too_large = settings.scheduler.refuse_too_large;
  out.scheduler.silent_after_ms = config::silent_after_ms(settings);
  out.scheduler.new_nonce = new_nonce;
  out.scheduler.webhook_url = [settings](const std::string& tenant) {
    return config::webhooks_of(settings, tenant).url;
  };
  for (const auto& [name, model] : settings.models)
    if (model.objective_s > 0) out.objectives_ms.emplace(name, std::llround(model.objective_s * 1e3));
  return out;
}

// The parts of a running coordinator, all on one executor.
class Coordinator {
 public:
  Coordinator(asio::io_context& io, const config::Settings& settings, ReadyHook on_ready)
      : io_(io), settings_(settings), on_ready_(std::move(on_ready)), tasks_(executor("coordinator")) {}

  Result<void> start() {
    auto catalogue = read_catalogue(settings_);
    if (!catalogue) return catalogue.error();
    auto endpoint = config::redis_endpoint(settings_);
    if (!endpoint) return endpoint.error();
    const redis::ConnectionOptions connection{.endpoint = *endpoint};
    // Images have their own connection, so that they do not delay assignments.
    control_ = redis::Connection::create(executor("redis"), connection);
    data_ = redis::Connection::create(executor("redis"), connection);
    auto store = results::open_store(results::store_options(settings_), data_);
    if (!store) return store.error();
    // So do uploads of adapters. The mirror polls the registry with small commands on the control connection.
    uploads_ = redis::Connection::create(executor("redis"), connection);
    adapters_ = std::make_shared<loras::RegistryMirror>(std::make_shared<loras::Registry>(control_));
    auto queue_options = queue::queue_options(settings_);
    queue_options.quota = [this](const std::string& tenant) { return quota(tenant); };
    auto scheduling_options = scheduler_options(settings_, *catalogue);
    scheduling_options.adapters = adapters_;
    scheduler_ = std::make_unique<scheduling::SchedulerService>(
        executor("scheduler"), control_, std::make_shared<queue::Client>(control_, queue_options),
        std::move(scheduling_options));
    gateway_ = gateway::make_gateway(
        executor("gateway"),
        gateway::GatewayDependencies{
            .settings = settings_,
            .catalogue = *catalogue,
            .queue = std::make_shared<queue::Client>(data_, queue_options),
            .store = *store,
            .redis = data_,
            .loras = std::make_shared<loras::Registry>(uploads_),
            .adapters = adapters_,
            .unready = [this] { return unready(); },
            .warnings = [this] { return scheduler_->warnings(); },
            .advise = [this](const job::JobSpec& spec, const std::string& tenant) { return advise(spec, tenant); },
            .leads = [this] { return scheduler_->leading(); },
            .waits_for = [this](const queue::UnitRef& unit) { return scheduler_->waits_for(unit); }});
    if (auto listening = gateway_->listen(); !listening) return listening.error();
    control_->start();
    data_->start();
    uploads_->start();
    scheduler_->start();
    tasks_.spawn("adapters", adapters_->follow(), Vital::kForever);
    tasks_.spawn("gateway", gateway_->run(), Vital::kForever);
    tasks_.spawn("ready", report_ready(), Vital::kOnce);
    spdlog::info("coordinator: serving at {}, Redis at {}", gateway_->url(), endpoint->display());
    return {};
  }

  asio::awaitable<void> stop() {
    spdlog::info("coordinator: stopping");
    tasks_.stop();
    co_await gateway_->stop(Deadline::after(kGatewayStop));
    co_await scheduler_->stop(Deadline::after(kSchedulerStop));
    co_await tasks_.join();
    control_->stop();
    data_->stop();
    uploads_->stop();
  }

 private:
  // `task`: what a long turn of the loop is blamed on.
  telemetry::TimedExecutor<asio::io_context::executor_type> executor(std::string_view task) {
    return {io_.get_executor(), task, ""};
  }

  // Why the service is not ready; empty if it is.
  std::vector<std::string> unready() const {
    const auto where = control_->options().endpoint.display();
    if (!control_->connected() || !data_->connected()) return {"Redis at " + where + " is not connected"};
    if (scheduler_->redis_refused()) return {scheduler_->refusal()};
    if (!scheduler_->library_loaded()) return {"the Function library is not loaded into Redis at " + where};
    if (!gateway_->knows_keys()) return {"the API keys were not read from Redis at " + where + " yet"};
    if (!gateway_->hears() || !scheduler_->hears())
      return {"this coordinator does not receive the events that Redis at " + where + " publishes"};
    if (scheduler_->leader_known()) return {};
    const auto& refusal = scheduler_->refusal();
    return {"no coordinator leads the shard yet" + (refusal.empty() ? "" : ": " + refusal)};
  }

  queue::Quota quota(const std::string& tenant) const {
    const auto& tenants = gateway_->tenants();
    const auto weight = [&](const std::string& name) {
      const auto found = settings_.tenants.find(name);
      return found == settings_.tenants.end() ? 1.0 : found->second.weight;
    };
    double total = tenants.contains(tenant) ? 0 : weight(tenant);
    for (const auto& name : tenants) total += weight(name);
    const auto own = config::quotas_of(settings_, tenant);
    const auto share = static_cast<double>(settings_.queue.max_queued) * weight(tenant) / total;
    return {own.queued_units, own.queued_bytes, std::max<std::int64_t>(1, static_cast<std::int64_t>(share)),
            settings_.queue.max_queued};
  }

  Result<void> advise(const job::JobSpec& spec, const std::string& tenant) const {
    if (scheduler_->redis_refused()) return unavailable(scheduler_->refusal());
    if (!spec.deadline_ms) return {};
    const auto expected = scheduler_->estimate(spec, tenant);
    if (!expected) return {};
    const auto now = scheduler_->now_us();
    const auto unmet = scheduling::unmet_deadline(*expected, now + *spec.deadline_ms * 1000, now);
    if (!unmet) return {};
    return Error{
        .code = Code::kResourceExhausted,
        .message = unmet->message,
        .param = unmet->param,
        .retry_after = std::clamp<std::chrono::seconds>(std::chrono::seconds(expected->wait_us / 1'000'000), 1s, 1h)};
  }

  asio::awaitable<void> report_ready() {
    asio::steady_timer timer(io_);
    while (!unready().empty()) {
      timer.expires_after(kReadyPoll);
      co_await timer.async_wait(asio::use_awaitable);
    }
    spdlog::info("coordinator: ready");
    if (on_ready_) on_ready_(gateway_->url());
  }

  asio::io_context& io_;
  config::Settings settings_;
  ReadyHook on_ready_;
  std::shared_ptr<redis::Connection> control_, data_, uploads_;
  std::shared_ptr<loras::RegistryMirror> adapters_;
  std::unique_ptr<scheduling::SchedulerService> scheduler_;
  std::unique_ptr<gateway::Gateway> gateway_;
  TaskGroup tasks_;
};

}  // namespace

int run_coordinator(const config::Settings& settings, ReadyHook on_ready) {
  const auto failed = [](const Error& error) {
    spdlog::error("coordinator: {}", error.message);
    return 1;
  };
  if (auto log = telemetry::configure_log("ditfleet", settings.log.level, settings.log.format); !log)
    return failed(log.error());
  const auto& wanted = settings.telemetry;
  auto tracing = telemetry::start_tracing({wanted.otlp_endpoint, wanted.sample_rate, wanted.slow_s},
                                          "ditfleet-coordinator", DITFLEET_VERSION);
  if (!tracing) return failed(tracing.error());
  ::umask(077);  // its files may contain prompts and images of tenants
  asio::io_context io(1);
  Coordinator coordinator(io, settings, std::move(on_ready));
  const bool hangup = hangup_ends();
  asio::signal_set signals(io, SIGTERM, SIGINT);
  if (hangup) signals.add(SIGHUP);
  if (const auto started = coordinator.start(); !started) return failed(started.error());
  signals.async_wait([&](const boost::system::error_code& error, int) {
    if (error) return;
    asio::co_spawn(
        io,
        [&]() -> asio::awaitable<void> {
          co_await coordinator.stop();
          io.stop();
        },
        end_process_on_exception("stop"));
    signals.async_wait([&](const boost::system::error_code& again, int) {
      if (!again) io.stop();
    });
  });
  io.run();
  return 0;
}

}  // namespace ditfleet
