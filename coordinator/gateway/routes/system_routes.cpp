// The service itself: the console page, the API's description, probes, metrics and models.
#include "coordinator/gateway/routes/api_context.h"
#include "coordinator/gateway/routes/embedded.h"
#include "coordinator/gateway/routes/errors.h"
#include "coordinator/gateway/routes/openapi.h"
#include "shared/telemetry/metrics.h"

namespace ditfleet::gateway {
namespace {

Response text_response(std::string_view content_type, std::string_view body) {
  Response response;
  response.content_type = content_type;
  response.body = body;
  return response;
}

Handler page(const std::string_view& text) {
  return [&text](const ApiContext& context, CallPtr) -> asio::awaitable<Result<Response>> {
    // A page may run only what this service sends, show that and results in its store, and connect to it alone.
    const std::string origin = context.dependencies.settings.results.s3.links ? context.service.result_origin() : "";
    co_return text_response("text/html; charset=utf-8", text)
        .with("Cache-Control", "no-cache")
        .with("Content-Security-Policy",
              std::string("default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; ") +
                  "img-src 'self' blob: data: " + origin + "; media-src 'self' " + origin +
                  "; connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'")
        .with("Referrer-Policy", "no-referrer");
  };
}

asio::awaitable<Result<Response>> asset(const ApiContext&, CallPtr call) {
  const std::string& name = call->param(0);
  if (name == "page.css") co_return text_response("text/css", kPageStyle).with("Cache-Control", "no-cache");
  if (name == "page.js") co_return text_response("text/javascript", kPageScript).with("Cache-Control", "no-cache");
  if (name == "alerts.md")
    co_return text_response("text/markdown; charset=utf-8", kAlertsText).with("Cache-Control", "no-cache");
  co_return Error{Code::kNotFound, "no file '" + name + "'; the files are page.css, page.js and alerts.md", {}};
}

asio::awaitable<Result<Response>> openapi(const ApiContext&, CallPtr) {
  co_return text_response("application/json", openapi_document());
}

asio::awaitable<Result<Response>> metrics(const ApiContext& context, CallPtr) {
  context.hub->history().speeds(unix_ms());  // sets their gauges
  co_return text_response("text/plain; version=0.0.4; charset=utf-8", telemetry::render_metrics());
}

asio::awaitable<Result<Response>> health(const ApiContext&, CallPtr) {
  co_return json_response(200, {{"status", "alive"}});
}

asio::awaitable<Result<Response>> ready(const ApiContext& context, CallPtr) {
  const auto ask = [](const auto& function) { return function ? function() : std::vector<std::string>(); };
  const std::vector<std::string> reasons = ask(context.dependencies.unready);
  Response response =
      json_response(reasons.empty() ? 200 : 503, {{"ready", reasons.empty()},
                                                  {"reasons", json::value_from(reasons)},
                                                  {"warnings", json::value_from(ask(context.dependencies.warnings))}});
  response.with("Cache-Control", "no-store");
  if (!reasons.empty()) response.with("Retry-After", "1");
  co_return response;
}

asio::awaitable<Result<Response>> list_models(const ApiContext& context, CallPtr) {
  const job::Catalogue& catalogue = context.dependencies.catalogue;
  json::array models;
  for (const auto& [name, model] : catalogue.models) models.push_back(model_json(model, context.started_s));
  co_return json_response(200, {{"object", "list"}, {"data", std::move(models)}, {"default", catalogue.default_model}});
}

asio::awaitable<Result<Response>> get_model(const ApiContext& context, CallPtr call) {
  const auto& models = context.dependencies.catalogue.models;
  const auto found = models.find(call->param(0));
  if (found == models.end())
    co_return status_response(404, "model '" + call->param(0) + "' not found; see /v1/models", "model_not_found");
  co_return json_response(200, model_json(found->second, context.started_s));
}

}  // namespace

void add_system_routes(Router& router) {
  router.add({"GET", "/", page(kConsolePage), Access::kOpen});
  router.add({"GET", "/jobs/{id}", page(kJobPage), Access::kOpen});
  router.add({"GET", "/fleet", page(kFleetPage), Access::kOpen});
  router.add({"GET", "/slow", page(kSlowPage), Access::kOpen});
  router.add({"GET", "/alerts", page(kAlertsPage), Access::kOpen});
  router.add({"GET", "/docs", page(kDocsPage), Access::kOpen});
  router.add({"GET", "/assets/{file}", asset, Access::kOpen});
  router.add({"GET", "/openapi.json", openapi, Access::kOpen});
  router.add({"GET", "/healthz", health, Access::kOpenProbe});
  router.add({"GET", "/readyz", ready, Access::kOpenProbe});
  router.add({"GET", "/metrics", metrics, Access::kMetrics});
  router.add({"GET", "/v1/models", list_models});
  router.add({"GET", "/v1/models/{model}", get_model});
}

}  // namespace ditfleet::gateway
