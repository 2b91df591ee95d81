#include "coordinator/gateway/routes/api.h"

#include <spdlog/spdlog.h>

#include <chrono>
#include <exception>

#include "coordinator/gateway/http/http_metrics.h"
#include "coordinator/gateway/routes/embedded.h"
#include "coordinator/gateway/routes/error_body.h"
#include "coordinator/gateway/routes/openapi.h"
#include "shared/core/bytes.h"
#include "shared/core/excerpt.h"
#include "shared/core/ids.h"
#include "shared/telemetry/metrics.h"
#include "shared/telemetry/spans.h"

namespace ditfleet::gateway {
namespace {

constexpr std::int64_t kMinimumLinkLifeS = 3600;

// A request id that the client chose is kept where it is harmless in logs and headers.
std::string request_id_of(const Request& request) {
  const std::string_view given = request.header("X-Request-Id");
  return is_valid_id(given) ? std::string(given) : new_id();
}

bool is_host(std::string_view host) {
  return !host.empty() && host.size() <= 255 &&
         host.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_:[]") ==
             std::string_view::npos;
}

Response text_response(std::string_view content_type, std::string_view body) {
  Response response;
  response.content_type = content_type;
  response.body = body;
  return response;
}

Response console_page() {
  // The page may run and show only what it brings along, and talk to this service alone.
  return text_response("text/html; charset=utf-8", kConsolePage)
      .with("Cache-Control", "no-cache")
      .with("Content-Security-Policy",
            "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src 'self' blob: data:; "
            "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'")
      .with("Referrer-Policy", "no-referrer");
}

Response unexpected(const std::exception& thrown, const std::string& request_id) {
  spdlog::error("request {} ended with an exception: {}", request_id, thrown.what());
  return error_response(
      internal_error("an error that was not foreseen; request " + request_id + " in the service's log says more"));
}

}  // namespace

std::int64_t now_s() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::optional<Response> refuse_coding(const Request& request) {
  if (const auto coding = request.header("Content-Encoding"); !coding.empty() && media_type_of(coding) != "identity") {
    return status_response(
        415, "the body is encoded as '" + excerpt(coding, 100) + "'; send it as it is, without Content-Encoding",
        "unsupported_media_type");
  }
  return std::nullopt;
}

std::optional<Response> refuse_repeated(const Request& request) {
  for (const char* name : {"Authorization", "Idempotency-Key", "Content-Type", "Last-Event-ID"}) {
    if (request.count_headers(name) < 2) continue;
    return status_response(400,
                           "the request has more than one " + std::string(name) + " header; send the one that is meant",
                           "bad_request");
  }
  return std::nullopt;
}

std::optional<Response> refuse_body(const Request& request) {
  if (auto refused = refuse_coding(request)) return refused;
  const std::string type = media_type_of(request.header("Content-Type"));
  if (!type.empty() && type != "application/json" && !type.ends_with("+json")) {
    return status_response(415,
                           "the body is '" + excerpt(type, 100) + "'; send JSON with 'Content-Type: application/json'",
                           "unsupported_media_type");
  }
  if (!is_valid_utf8(request.body)) {
    return error_response(invalid_argument("the body is not valid UTF-8; send JSON encoded as UTF-8"));
  }
  return std::nullopt;
}

Api::Api(ApiOptions options, JobService& service, std::shared_ptr<EventHub> hub)
    : options_(std::move(options)),
      keys_(options_.settings.keys),
      service_(service),
      hub_(std::move(hub)),
      created_s_(now_s()) {}

JobLinks Api::links(const Call& call) const {
  JobLinks links;
  const std::string_view host = call.request.header("Host");
  if (!options_.settings.gateway.public_url.empty()) {
    links.base = options_.settings.gateway.public_url;
    while (links.base.ends_with('/')) links.base.pop_back();
  } else {
    links.base = is_host(host) ? "http://" + std::string(host) : options_.local_url;
  }
  links.keys = &keys_;
  links.expires_s = now_s() + std::max(kMinimumLinkLifeS, options_.settings.queue.retention_ms / 1000);
  return links;
}

Result<Caller> Api::authenticate(const Call& call) const {
  const RouteId id = call.match.route->id;
  if (call.match.route->open) return Caller{};
  const auto signature = call.request.query_value("sig");
  if (signature && (id == RouteId::kGetResult || id == RouteId::kGetPreview)) {
    const auto expires = call.request.query_value("expires");
    if (keys_.verify(call.request.path(), expires.value_or(""), *signature, now_s())) return Caller{"", true};
    if (!keys_.open() && !call.request.has_header("Authorization")) {
      return Error{
          Code::kUnauthenticated, "this link has expired or was changed; ask /v1/jobs/{id} for a fresh one", {}};
    }
  }
  return keys_.authenticate(call.request.header("Authorization"));
}

asio::awaitable<Response> Api::handle(Request request) {
  auto call = std::make_shared<Call>();
  call->request = std::move(request);
  call->request_id = request_id_of(call->request);
  call->traceparent = telemetry::child_traceparent(call->request.header("traceparent"));
  call->match = match_route(call->request);

  Response response;
  if (auto refused = refuse_repeated(call->request)) {
    response = std::move(*refused);
  } else if (call->match.route != nullptr) {
    auto caller = authenticate(*call);
    if (caller) {
      call->caller = *caller;
      try {
        response = co_await dispatch(call);
      } catch (const boost::system::system_error& e) {
        if (e.code() == asio::error::operation_aborted) throw;
        response = unexpected(e, call->request_id);
      } catch (const std::exception& e) {
        response = unexpected(e, call->request_id);
      }
    } else {
      response = error_response(caller.error());
      if (!call->request.header("Authorization").empty()) {
        response.body = error_json(caller.error().message, "authentication_error", {}, "invalid_api_key") + "\n";
      }
    }
  } else if (!call->match.allow.empty() && call->request.method == "OPTIONS") {
    response.status = 204;
    response.content_type.clear();
    response.with("Allow", call->match.allow);
  } else if (!call->match.allow.empty()) {
    response = status_response(
        405, call->request.path() + " does not take " + call->request.method + "; it takes " + call->match.allow,
        "method_not_allowed");
    response.with("Allow", call->match.allow);
  } else {
    response = status_response(404, "there is no " + call->request.path() + "; /openapi.json lists what there is",
                               "not_found");
  }

  if (response.later) {
    response.later = [this, call, inner = std::move(response.later)](Peer& peer) -> asio::awaitable<Response> {
      Response late;
      try {
        late = co_await inner(peer);
      } catch (const boost::system::system_error& e) {
        if (e.code() == asio::error::operation_aborted) throw;
        late = unexpected(e, call->request_id);
      } catch (const std::exception& e) {
        late = unexpected(e, call->request_id);
      }
      finish(*call, late);
      co_return late;
    };
    co_return response;
  }
  if (response.stream && call->request.method == "HEAD") response.stream = nullptr;
  finish(*call, response);
  co_return response;
}

Response Api::refuse(int status, const std::string& message, const std::string& code) {
  Response response = status_response(status, message, code);
  response.close = true;
  if (status == 503) response.with("Retry-After", "1");
  count_request("none", "none", status, 0);
  return response;
}

void Api::finish(const Call& call, Response& response) const {
  response.with("X-Request-Id", call.request_id);
  response.with("traceparent", call.traceparent);
  response.with("X-Content-Type-Options", "nosniff");
  const std::chrono::duration<double> took = Deadline::Clock::now() - call.began;
  const std::string_view route = call.match.pattern.empty() ? std::string_view("none") : call.match.pattern;
  count_request(route, call.request.method, response.status, took.count());
  trace(call, response.status, took);
  // Whoever starts a service asks until it is ready.
  const bool probe = call.match.route != nullptr &&
                     (call.match.route->id == RouteId::kReady || call.match.route->id == RouteId::kHealth);
  const auto level = probe                                                    ? spdlog::level::debug
                     : response.status >= 500                                 ? spdlog::level::warn
                     : call.request.method == "GET" || response.status == 404 ? spdlog::level::debug
                                                                              : spdlog::level::info;
  spdlog::log(level, "{} {} {} {:.1f} ms tenant={} request={}", call.request.method, call.request.path(),
              response.status, took.count() * 1e3, call.caller.tenant, call.request_id);
}

// A span of its own for what changes something, and for what came with a trace: not for every poll.
void Api::trace(const Call& call, int status, std::chrono::duration<double> took) const {
  const auto caller_span = telemetry::SpanContext::parse(call.request.header("traceparent"));
  const bool reads = call.request.method == "GET" || call.request.method == "HEAD" || call.request.method == "OPTIONS";
  if (!telemetry::spans_wanted() || (reads && !caller_span.valid()) || call.match.route == nullptr) return;
  auto span = telemetry::SpanTimer::of(call.request.method + " " + std::string(call.match.pattern),
                                       telemetry::SpanContext::parse(call.traceparent), caller_span.span_id,
                                       telemetry::SpanKind::kServer);
  span.began(std::chrono::system_clock::now() - std::chrono::duration_cast<std::chrono::system_clock::duration>(took));
  span.attribute("http.request.method", call.request.method);
  span.attribute("http.route", std::string(call.match.pattern));
  span.attribute("url.path", call.request.path());
  span.attribute("http.response.status_code", static_cast<std::int64_t>(status));
  span.attribute("ditfleet.tenant", call.caller.tenant);
  span.attribute("ditfleet.request.id", call.request_id);
  if (status >= 500) {
    span.attribute("error.type", std::to_string(status));
    span.failed("answered with " + std::to_string(status));
  }
}

asio::awaitable<Response> Api::dispatch(CallPtr call) {
  switch (call->match.route->id) {
    case RouteId::kConsole: co_return console_page();
    case RouteId::kOpenApi: co_return text_response("application/json", openapi_document());
    case RouteId::kHealth: co_return health();
    case RouteId::kReady: co_return ready();
    case RouteId::kMetrics:
      co_return text_response("text/plain; version=0.0.4; charset=utf-8", telemetry::render_metrics());
    case RouteId::kListModels: co_return list_models();
    case RouteId::kGetModel: co_return get_model(*call);
    case RouteId::kGenerateImages: co_return co_await generate_images(call);
    case RouteId::kSubmitJob: co_return co_await submit_job(call);
    case RouteId::kListJobs: co_return co_await list_jobs(call);
    case RouteId::kGetJob: co_return co_await get_job(call);
    case RouteId::kCancelJob: co_return co_await cancel_job(call);
    case RouteId::kJobEvents: co_return co_await job_events(call);
    case RouteId::kGetResult: co_return co_await get_result(call);
    case RouteId::kGetPreview: co_return co_await get_preview(call);
    case RouteId::kListLoras: co_return co_await list_loras(call);
    case RouteId::kGetLora: co_return co_await get_lora(call);
    case RouteId::kPutLora: co_return co_await put_lora(call);
    case RouteId::kPatchLora: co_return co_await patch_lora(call);
    case RouteId::kRemoveLora: co_return co_await remove_lora(call);
    case RouteId::kListWorkers: co_return co_await list_workers(call);
  }
  co_return error_response(internal_error("a route without a handler"));
}

Response Api::health() const { return json_response(200, R"({"status":"alive"})"); }

Response Api::ready() const {
  const Readiness readiness = options_.readiness ? options_.readiness() : Readiness{true, {}};
  json::array reasons;
  for (const auto& reason : readiness.reasons) reasons.emplace_back(reason);
  Response response =
      json_response(readiness.ready ? 200 : 503,
                    json::serialize(json::object{{"ready", readiness.ready}, {"reasons", std::move(reasons)}}));
  response.with("Cache-Control", "no-store");
  if (!readiness.ready) response.with("Retry-After", "1");
  return response;
}

Response Api::list_models() const {
  json::array models;
  for (const auto& [name, model] : options_.catalogue.models) models.push_back(model_json(model, created_s_));
  return json_response(
      200, json::serialize(json::object{
               {"object", "list"}, {"data", std::move(models)}, {"default", options_.catalogue.default_model}}));
}

Response Api::get_model(const Call& call) const {
  const auto found = options_.catalogue.models.find(call.match.params[0]);
  if (found == options_.catalogue.models.end()) {
    return status_response(404, "there is no model '" + call.match.params[0] + "'; /v1/models lists those there are",
                           "model_not_found");
  }
  return json_response(200, json::serialize(model_json(found->second, created_s_)));
}

}  // namespace ditfleet::gateway
