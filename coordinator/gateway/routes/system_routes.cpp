// The service itself: the console page, the API's description, probes, metrics, models and workers.
#include <algorithm>
#include <functional>
#include <set>

#include "coordinator/gateway/routes/api_context.h"
#include "coordinator/gateway/routes/embedded.h"
#include "coordinator/gateway/routes/errors.h"
#include "coordinator/gateway/routes/openapi.h"
#include "shared/core/json.h"
#include "shared/core/wall_clock.h"
#include "shared/loras/registry_mirror.h"
#include "shared/telemetry/metrics.h"

namespace ditfleet::gateway {
namespace {

Response text_response(std::string_view content_type, std::string_view body) {
  Response response;
  response.content_type = content_type;
  response.body = body;
  return response;
}

class SystemRoutes {
 public:
  explicit SystemRoutes(const ApiContext& context)
      : service_(context.service), dependencies_(context.dependencies), created_s_(unix_ms() / 1000) {}

  asio::awaitable<Response> console(CallPtr) {
    // The page may run and show only what is part of it, and may connect to this service only.
    co_return text_response("text/html; charset=utf-8", kConsolePage)
        .with("Cache-Control", "no-cache")
        .with("Content-Security-Policy",
              "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src 'self' blob: data:; "
              "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'")
        .with("Referrer-Policy", "no-referrer");
  }
  asio::awaitable<Response> openapi(CallPtr) { co_return text_response("application/json", openapi_document()); }
  asio::awaitable<Response> metrics(CallPtr) {
    co_return text_response("text/plain; version=0.0.4; charset=utf-8", telemetry::render_metrics());
  }
  asio::awaitable<Response> health(CallPtr) { co_return json_response(200, R"({"status":"alive"})"); }

  asio::awaitable<Response> ready(CallPtr) {
    const Readiness readiness = dependencies_.readiness ? dependencies_.readiness() : Readiness{};
    json::array reasons;
    for (const auto& reason : readiness.reasons) reasons.emplace_back(reason);
    Response response =
        json_response(readiness.ready ? 200 : 503,
                      json::serialize(json::object{{"ready", readiness.ready}, {"reasons", std::move(reasons)}}));
    response.with("Cache-Control", "no-store");
    if (!readiness.ready) response.with("Retry-After", "1");
    co_return response;
  }

  asio::awaitable<Response> list_models(CallPtr) {
    const job::Catalogue& catalogue = dependencies_.catalogue;
    json::array models;
    for (const auto& [name, model] : catalogue.models) models.push_back(model_json(model, created_s_));
    co_return json_response(
        200, json::serialize(
                 json::object{{"object", "list"}, {"data", std::move(models)}, {"default", catalogue.default_model}}));
  }

  asio::awaitable<Response> get_model(CallPtr call) {
    const auto& models = dependencies_.catalogue.models;
    const auto found = models.find(call->param(0));
    if (found == models.end())
      co_return status_response(404, "model '" + call->param(0) + "' not found; see /v1/models", "model_not_found");
    co_return json_response(200, json::serialize(model_json(found->second, created_s_)));
  }

  asio::awaitable<Response> list_workers(CallPtr call) {
    auto workers = co_await service_.workers();
    if (!workers) co_return error_response(workers.error());
    // All tenants share the workers, but each sees only its own jobs and adapters on them.
    if (!call->caller.sees_all) {
      // Another tenant's digest would reveal to anyone who has the same file who uses it.
      std::set<std::string> own;
      if (dependencies_.adapters) {
        for (const loras::Adapter& adapter : dependencies_.adapters->list(call->caller.tenant).adapters)
          own.insert(adapter.sha256);
      }
      for (auto& worker : *workers) {
        for (auto* digests : {&worker.adapters, &worker.host_adapters}) {
          std::erase_if(*digests, [&](const std::string& digest) { return !own.contains(digest); });
        }
      }
    }
    json::array array;
    for (auto& worker : *workers) {
      // The last reported state is obsolete: the scheduler gives a silent worker no units.
      if (worker.unheard_ms > config::silent_after_ms(dependencies_.settings)) worker.state = "silent";
      array.push_back(worker_json(worker, [&](const std::string& id) {
        const auto tenant = worker.tenants.find(id);
        return call->caller.sees_all || (tenant != worker.tenants.end() && tenant->second == call->caller.tenant);
      }));
    }
    co_return json_response(200, json::serialize(json::object{{"workers", std::move(array)}}))
        .with("Cache-Control", "no-store");
  }

 private:
  JobService& service_;
  const GatewayDependencies& dependencies_;
  std::int64_t created_s_;  // reported as the models' creation time
};

}  // namespace

void add_system_routes(Router& router, const ApiContext& context) {
  const auto routes = std::make_shared<SystemRoutes>(context);
  router.add({"GET", "/", std::bind_front(&SystemRoutes::console, routes), Access::kOpen});
  router.add({"GET", "/openapi.json", std::bind_front(&SystemRoutes::openapi, routes), Access::kOpen});
  router.add({"GET", "/healthz", std::bind_front(&SystemRoutes::health, routes), Access::kOpenProbe});
  router.add({"GET", "/readyz", std::bind_front(&SystemRoutes::ready, routes), Access::kOpenProbe});
  router.add({"GET", "/metrics", std::bind_front(&SystemRoutes::metrics, routes), Access::kMetrics});
  router.add({"GET", "/v1/models", std::bind_front(&SystemRoutes::list_models, routes)});
  router.add({"GET", "/v1/models/{model}", std::bind_front(&SystemRoutes::get_model, routes)});
  router.add({"GET", "/v1/workers", std::bind_front(&SystemRoutes::list_workers, routes)});
}

}  // namespace ditfleet::gateway
