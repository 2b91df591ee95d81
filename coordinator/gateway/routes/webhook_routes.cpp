// Webhooks: the tenant's secret, and deliveries that were not accepted.
#include <spdlog/spdlog.h>

#include "coordinator/gateway/backend/redis_error.h"
#include "coordinator/gateway/routes/api_context.h"
#include "coordinator/gateway/routes/errors.h"
#include "coordinator/gateway/webhooks/signature.h"

namespace ditfleet::gateway {
namespace {

using Answer = Result<json::object>;

Error webhook_error(const Error& error) {
  if (error.code == Code::kNotFound) return error;
  return redis_error(error, "the queue's Redis", "nothing was changed, try again shortly", "raise its maxmemory");
}

asio::awaitable<Answer> get_secret(const ApiContext& context, CallPtr call) {
  const auto secrets = co_await context.deliveries->secrets(call->caller.tenant);
  if (!secrets) co_return webhook_error(secrets.error());
  co_return json::object{{"object", "webhook.secret"}, {"tenant", call->caller.tenant}, {"secret", secrets->front()}};
}

asio::awaitable<Answer> rotate_secret(const ApiContext& context, CallPtr call) {
  const auto secret = co_await context.deliveries->rotate(call->caller.tenant);
  if (!secret) co_return webhook_error(secret.error());
  spdlog::info("audit: {} of tenant '{}' rotated the secret of its webhooks, request {}",
               call->caller.key.empty() ? "nobody's key" : "key " + call->caller.key, call->caller.tenant,
               call->request_id);
  co_return json::object{{"object", "webhook.secret"}, {"tenant", call->caller.tenant}, {"secret", *secret}};
}

asio::awaitable<Answer> list_deliveries(const ApiContext& context, CallPtr call) {
  const auto deliveries = co_await context.deliveries->list(call->caller.view());
  if (!deliveries) co_return webhook_error(deliveries.error());
  json::array list;
  for (const Delivery& delivery : *deliveries) list.push_back(delivery_json(delivery));
  co_return json::object{{"object", "list"}, {"deliveries", std::move(list)}};
}

asio::awaitable<Answer> replay(const ApiContext& context, CallPtr call) {
  const auto delivery = co_await context.deliveries->replay(call->param(0), call->caller.view());
  if (!delivery) co_return webhook_error(delivery.error());
  co_return delivery_json(*delivery);
}

}  // namespace

void add_webhook_routes(Router& router) {
  const auto add = [&](std::string_view method, std::string_view pattern, auto handler) {
    const auto answer = [handler](const ApiContext& context, CallPtr call) -> asio::awaitable<Result<Response>> {
      if (!context.deliveries) co_return unavailable("this gateway has no store for webhooks");
      const auto body = co_await handler(context, call);
      if (!body) co_return body.error();
      co_return json_response(200, *body).with("Cache-Control", "no-store");
    };
    router.add({method, pattern, answer});
  };
  add("GET", "/v1/webhooks/secret", get_secret);
  add("POST", "/v1/webhooks/secret/rotate", rotate_secret);
  add("GET", "/v1/webhooks/deliveries", list_deliveries);
  add("POST", "/v1/webhooks/deliveries/{id}/replay", replay);
}

}  // namespace ditfleet::gateway
