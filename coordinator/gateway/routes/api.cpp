#include "coordinator/gateway/routes/api.h"

#include <spdlog/spdlog.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <exception>
#include <utility>

#include "coordinator/gateway/http/http_metrics.h"
#include "coordinator/gateway/routes/errors.h"
#include "coordinator/gateway/routes/foreign_site.h"
#include "shared/core/ids.h"
#include "shared/core/wall_clock.h"
#include "shared/telemetry/metrics.h"
#include "shared/telemetry/spans.h"
#include "shared/telemetry/turns.h"

namespace ditfleet::gateway {
namespace {

constexpr std::chrono::seconds kUseAge{1};

// Runs the work under the route's name (Turn). Turns an exception into a response. Only cancellation of the coroutine
// passes through.
asio::awaitable<Response> guarded(CallPtr call, asio::awaitable<Response> work) {
  try {
    const auto& [route, params, allow, pattern] = call->match;
    const auto inner = co_await asio::this_coro::executor;  // alone: GCC 12 evaluates both branches of a ?: beside it
    const telemetry::TimedExecutor<asio::any_io_executor> executor(inner, route ? route->method : "a request to",
                                                                   pattern.empty() ? "no route" : pattern);
    co_return co_await asio::co_spawn(executor, std::move(work), asio::use_awaitable);
  } catch (const std::exception& thrown) {
    const auto* failed = dynamic_cast<const boost::system::system_error*>(&thrown);
    if (failed && failed->code() == asio::error::operation_aborted) throw;
    spdlog::error("request {} ended with an exception: {}", call->request_id, thrown.what());
    co_return error_response(internal_error("internal error; search the service log for request " + call->request_id));
  }
}

// Records a span for requests that change something or that carry a trace, not for every poll.
void trace(const Call& call, telemetry::SpanContext context, int status, std::chrono::duration<double> took) {
  if (!telemetry::spans_wanted() || call.match.route == nullptr) return;
  const auto caller_span = telemetry::SpanContext::parse(call.request.header("traceparent"));
  const bool reads = call.request.method == "GET" || call.request.method == "HEAD" || call.request.method == "OPTIONS";
  if (reads && !caller_span.valid()) return;
  context.sampled = context.sampled || status >= 500 || telemetry::is_slow(took);
  if (!context.sampled) return;
  auto span = telemetry::SpanTimer::of(call.request.method + " " + std::string(call.match.pattern), context,
                                       caller_span.span_id, telemetry::SpanKind::kServer);
  span.began(std::chrono::system_clock::now() - std::chrono::duration_cast<std::chrono::system_clock::duration>(took));
  span.attribute("http.request.method", call.request.method);
  span.attribute("http.route", std::string(call.match.pattern));
  span.attribute("url.path", call.request.path());
  span.attribute("http.response.status_code", static_cast<std::int64_t>(status));
  span.attribute("ditfleet.tenant", call.caller.tenant);
  span.attribute("ditfleet.request.id", call.request_id);
  if (status >= 500) {
    span.attribute("error.type", std::to_string(status));
    span.failed("response status " + std::to_string(status));
  }
}

}  // namespace

Api::Api(GatewayDependencies dependencies, JobService& service, std::shared_ptr<EventHub> hub, std::string local_url)
    : context_{.service = service,
               .hub = std::move(hub),
               .local_url = std::move(local_url),
               .keys = KeyRing(dependencies.settings.keys),
               .dependencies = std::move(dependencies)} {
  const auto& settings = context_.dependencies.settings;
  if (settings.gateway.require_keys)
    context_.keys.require_keys(
        "an API key is required, but there is none yet; configure an administrator's key (option `keys`), or set "
        "gateway.require_keys to false until you have added one");
  context_.keys.on_change = [this] { end_refused(); };
  if (context_.dependencies.redis)
    context_.key_store =
        std::make_unique<KeyStore>(context_.dependencies.redis, context_.keys, config::data_folder(settings));
  if (const auto& redis = context_.dependencies.redis; redis && context_.dependencies.queue) {
    const int shard = context_.dependencies.queue->options().shard;
    context_.deliveries = std::make_shared<DeliveryStore>(redis, shard);
    deliverer_ = std::make_unique<Deliverer>(
        redis->executor(), redis, shard, settings,
        Deliverer::Source{.leads = [this] { return context_.dependencies.leads && context_.dependencies.leads(); },
                          .job = [this](std::string id) -> asio::awaitable<Result<queue::JobRecord>> {
                            co_return co_await context_.service.job(id, "");
                          },
                          .describe =
                              [this](const queue::JobRecord& record) {
                                return context_.describe(record, context_.links(std::string_view()), true);
                              }});
  }
  add_system_routes(router_);
  add_image_routes(router_);
  add_video_routes(router_);
  add_job_routes(router_);
  add_batch_routes(router_);
  add_fleet_routes(router_);
  add_event_routes(router_);
  add_lora_routes(router_);
  add_upload_routes(router_);
  add_key_routes(router_);
  add_webhook_routes(router_);
  add_worker_routes(router_);
}

Result<Caller> Api::authenticate(const Call& call) const {
  const Access access = call.match.route->access;
  if (access == Access::kOpen || access == Access::kOpenProbe) return Caller{};
  if (access == Access::kMetrics) return authenticate_scraper(call.request);
  const auto signature = call.request.query_value("sig");
  if (signature && access == Access::kKeyOrLink && !context_.keys.open()) {
    const auto expires = call.request.query_value("expires");
    const auto id = call.request.query_value("kid");
    if (context_.signer.verify(call.request.path(), expires.value_or(""), id.value_or(""), *signature,
                               unix_ms() / 1000))
      return Caller{"", true};
    if (!call.request.has_header("Authorization")) {
      return Error{
          Code::kUnauthenticated, "this link has expired or was modified; request a new one from /v1/jobs/{id}", {}};
    }
  }
  auto caller = context_.keys.authenticate(call.request.header("Authorization"));
  if (caller && access == Access::kAdministrator && !caller->sees_all)
    return Error{Code::kPermissionDenied, call.request.path() + " needs an administrator's key", {}};
  return caller;
}

Result<Caller> Api::authenticate_scraper(const Request& request) const {
  if (is_from_this_host(request) && context_.dependencies.settings.gateway.metrics_listen.empty()) return Caller{};
  auto caller = context_.keys.authenticate(request.header("Authorization"));
  if (caller && !caller->sees_all) {
    return Error{Code::kPermissionDenied,
                 "/metrics needs an administrator's key; or set gateway.metrics_listen to a separate address",
                 {}};
  }
  return caller;
}

bool Api::is_vital(const Request& head) const {
  const RouteMatch match = router_.match(head);
  return match.route != nullptr && match.route->vital();
}

bool Api::wants_stream(const Request& head) const {
  const RouteMatch match = router_.match(head);
  if (match.route == nullptr) return false;
  if (!is_json_type(media_type_of(head.header("Content-Type")))) return match.route->streams_body;
  if (!match.route->takes_images) return false;
  const auto length = number_of(head.header("Content-Length"), std::int64_t{0});
  return head.has_header("Transfer-Encoding") ||
         (length && *length > context_.dependencies.settings.gateway.max_body_bytes);
}

std::optional<Response> Api::check(Call& call) const {
  const Request& request = call.request;
  const RouteMatch& match = call.match;
  if (auto refused = refuse_repeated_headers(request)) return refused;
  if (context_.keys.open() && (match.route == nullptr || !match.route->vital())) {
    if (auto refused = refuse_foreign_site(request, context_.dependencies.settings)) return refused;
  }
  if (match.allow.empty())
    return status_response(404, "no route for " + request.path() + "; see /openapi.json", "not_found");
  if (match.route == nullptr) {
    Response response;
    if (request.method == "OPTIONS") {
      response.status = 204;
      response.content_type.clear();
    } else {
      response =
          status_response(405, request.path() + " does not support " + request.method + "; it supports " + match.allow,
                          "method_not_allowed");
    }
    return response.with("Allow", match.allow);
  }
  auto caller = authenticate(call);
  if (!caller) {
    Response response = error_response(caller.error());
    if (!request.header("Authorization").empty() && caller.error().code == Code::kUnauthenticated)
      response.body = status_response(response.status, caller.error().message, "invalid_api_key").body;
    return response;
  }
  call.caller = std::move(*caller);
  return std::nullopt;
}

asio::awaitable<Response> Api::respond(std::shared_ptr<Call> call) {
  if (auto refused = check(*call)) co_return std::move(*refused);
  std::shared_ptr<void> upload;
  if (Response refused; call->request.stream && !(upload = context_.open_stream(*call, refused))) co_return refused;
  auto answer = co_await call->match.route->handler(context_, call);
  Response response = answer ? std::move(*answer) : error_response(answer.error());
  const std::string_view route = call->match.pattern;
  const bool submits = call->request.method == "POST" && (route == "/v1/jobs" || route == "/v1/batches" ||
                                                          route == "/v1/videos" || route.starts_with("/v1/images/"));
  if (!submits || (!answer && response.status != 429)) co_return response;
  const std::int64_t reset_s = answer ? 1 : std::max<std::int64_t>(1, answer.error().retry_after.count());
  co_await add_limits(call->caller.tenant, !answer, reset_s, response);
  co_return response;
}

// The tenant's queued units, in the headers that OpenAI's clients know.
asio::awaitable<void> Api::add_limits(std::string tenant, bool refused, std::int64_t reset_s, Response& response) {
  const auto& queue = context_.dependencies.queue;
  auto limit = config::quotas_of(context_.dependencies.settings, tenant).queued_units;
  if (limit == 0 && queue && queue->options().quota) limit = queue->options().quota(tenant).share;
  if (limit == 0) co_return;
  if (refused || uses_stale_.passed()) {
    uses_stale_ = Deadline::after(kUseAge);
    auto uses = co_await context_.service.use();
    if (!uses) co_return;
    uses_ = std::move(*uses);
  }
  const auto left = std::max<std::int64_t>(0, limit - uses_[tenant].units);
  response.with("x-ratelimit-limit-requests", std::to_string(limit))
      .with("x-ratelimit-remaining-requests", std::to_string(left))
      .with("x-ratelimit-reset-requests", std::to_string(reset_s) + "s");
}

std::shared_ptr<Call> Api::begin(Request request) const {
  auto call = std::make_shared<Call>();
  call->request = std::move(request);
  // A client's request id is kept if it is harmless in logs and headers.
  const std::string_view id = call->request.header("X-Request-Id");
  call->request_id = is_valid_id(id) ? std::string(id) : new_id();
  call->traceparent = telemetry::child_traceparent(call->request.header("traceparent"));
  call->match = router_.match(call->request);
  return call;
}

std::optional<Response> Api::refuse_head(const Request& head) const {
  const auto call = begin(head);
  auto refused = check(*call);
  if (refused) finish(*call, *refused);
  return refused;
}

std::shared_ptr<void> Api::hold(const Call& call, Sink& client) {
  if (!context_.keys.still_accepts(call.caller)) client.abort();  // revoked while the request was handled
  const auto at = held_.emplace(held_.end(), &call.caller, &client);
  return {&*at, [this, at](void*) { held_.erase(at); }};
}

void Api::hold_stream(CallPtr call, Response& response) {
  if (!response.stream) return;
  response.stream = [this, call, inner = std::move(response.stream)](Sink& client) -> asio::awaitable<void> {
    const auto held = hold(*call, client);
    co_await inner(client);
  };
}

void Api::end_refused() {
  for (const auto& [caller, client] : held_)
    if (!context_.keys.still_accepts(*caller)) client->abort();
}

asio::awaitable<Response> Api::handle(Request request) {
  auto call = begin(std::move(request));
  Response response = co_await guarded(call, respond(call));
  if (response.later) {
    response.later = [this, call, headers = response.headers,
                      inner = std::move(response.later)](Sink& client) -> asio::awaitable<Response> {
      const auto held = hold(*call, client);
      Response late = co_await guarded(call, inner(client));
      late.headers.insert(late.headers.end(), headers.begin(), headers.end());
      finish(*call, late);
      hold_stream(call, late);
      co_return late;
    };
    co_return response;
  }
  if (response.stream && call->request.method == "HEAD") response.stream = nullptr;
  hold_stream(call, response);
  finish(*call, response);
  co_return response;
}

Response Api::refuse(int status, const std::string& message, const std::string& code) const {
  Response response = status_response(status, message, code);
  if (status == 503) response.with("Retry-After", "1");
  count_request("none", "none", status, 0);
  return response;
}

void Api::finish(const Call& call, Response& response) const {
  response.with("X-Request-Id", call.request_id);
  response.with("traceparent", call.traceparent);
  response.with("X-Content-Type-Options", "nosniff");
  if (!context_.keys.open()) allow_origin(call.request, context_.dependencies.settings, response);
  const std::chrono::duration<double> took = Deadline::Clock::now() - call.began;
  const std::string_view route = call.match.pattern.empty() ? std::string_view("none") : call.match.pattern;
  count_request(route, call.request.method, response.status, took.count());
  const auto context = telemetry::SpanContext::parse(call.traceparent);
  trace(call, context, response.status, took);
  const bool probe = call.match.route != nullptr && call.match.route->access == Access::kOpenProbe;
  const auto level = probe                                                    ? spdlog::level::debug
                     : response.status >= 500                                 ? spdlog::level::warn
                     : call.request.method == "GET" || response.status == 404 ? spdlog::level::debug
                                                                              : spdlog::level::info;
  if (!spdlog::should_log(level)) return;
  std::string more;
  for (const auto& [name, value] : response.headers)
    if (name == "X-Job-Id" || (name == "Location" && value.starts_with("/v1/jobs/")))
      more = " job=" + value.substr(value.rfind('/') + 1);
  if (response.status >= 400) {
    const auto body = parse_json(response.body);
    boost::system::error_code none;
    if (const auto* why = body ? body->find_pointer("/error/message", none) : nullptr)
      more += " error=" + json::serialize(*why);
  }
  const telemetry::ContextScope scope(context);
  spdlog::log(level, "{} {} {} {:.1f} ms tenant={} request={}{}", call.request.method, call.request.path(),
              response.status, took.count() * 1e3, call.caller.tenant, call.request_id, more);
}

}  // namespace ditfleet::gateway
