#include "coordinator/gateway/routes/routes.h"

#include <array>
#include <optional>

namespace ditfleet::gateway {
namespace {

constexpr std::array kRoutes = {
    Route{RouteId::kConsole, "GET", "/", true},
    Route{RouteId::kOpenApi, "GET", "/openapi.json", true},
    Route{RouteId::kHealth, "GET", "/healthz", true},
    Route{RouteId::kReady, "GET", "/readyz", true},
    Route{RouteId::kMetrics, "GET", "/metrics", true},
    Route{RouteId::kGenerateImages, "POST", "/v1/images/generations"},
    Route{RouteId::kListModels, "GET", "/v1/models"},
    Route{RouteId::kGetModel, "GET", "/v1/models/{model}"},
    Route{RouteId::kSubmitJob, "POST", "/v1/jobs"},
    Route{RouteId::kListJobs, "GET", "/v1/jobs"},
    Route{RouteId::kGetJob, "GET", "/v1/jobs/{id}"},
    Route{RouteId::kCancelJob, "DELETE", "/v1/jobs/{id}"},
    Route{RouteId::kJobEvents, "GET", "/v1/jobs/{id}/events"},
    Route{RouteId::kGetResult, "GET", "/v1/jobs/{id}/results/{index}"},
    Route{RouteId::kGetPreview, "GET", "/v1/jobs/{id}/previews/{event}"},
    Route{RouteId::kListLoras, "GET", "/v1/loras"},
    Route{RouteId::kGetLora, "GET", "/v1/loras/{name}"},
    Route{RouteId::kPutLora, "PUT", "/v1/loras/{name}"},
    Route{RouteId::kPatchLora, "PATCH", "/v1/loras/{name}"},
    Route{RouteId::kRemoveLora, "DELETE", "/v1/loras/{name}"},
    Route{RouteId::kListWorkers, "GET", "/v1/workers"},
};

std::optional<std::vector<std::string>> match_pattern(std::string_view pattern, const Request& request) {
  if (request.trailing_slash) return std::nullopt;
  std::vector<std::string> params;
  std::size_t index = 0;
  pattern.remove_prefix(1);
  while (!pattern.empty()) {
    const auto slash = pattern.find('/');
    const std::string_view part = pattern.substr(0, slash);
    if (index == request.segments.size()) return std::nullopt;
    const std::string& segment = request.segments[index++];
    if (part.front() == '{') {
      if (segment.empty()) return std::nullopt;
      params.push_back(segment);
    } else if (part != segment) {
      return std::nullopt;
    }
    if (slash == std::string_view::npos) break;
    pattern.remove_prefix(slash + 1);
  }
  if (index != request.segments.size()) return std::nullopt;
  return params;
}

}  // namespace

std::span<const Route> routes() { return kRoutes; }

RouteMatch match_route(const Request& request) {
  RouteMatch match;
  const std::string_view wanted = request.method == "HEAD" ? std::string_view("GET") : std::string_view(request.method);
  for (const Route& route : kRoutes) {
    auto params = match_pattern(route.pattern, request);
    if (!params) continue;
    match.pattern = route.pattern;
    match.allow += std::string(match.allow.empty() ? "" : ", ") + std::string(route.method);
    if (route.method == "GET") match.allow += ", HEAD";
    if (route.method == wanted) {
      match.route = &route;
      match.params = std::move(*params);
    }
  }
  if (!match.allow.empty()) match.allow += ", OPTIONS";
  return match;
}

}  // namespace ditfleet::gateway
