#include "coordinator/gateway/routes/router.h"

#include <optional>
#include <utility>

namespace ditfleet::gateway {
namespace {

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

RouteMatch Router::match(const Request& request) const {
  RouteMatch match;
  const std::string_view wanted = request.method == "HEAD" ? std::string_view("GET") : std::string_view(request.method);
  bool fixed = false;  // a pattern without parameters matches
  for (const Route& route : routes_) {
    auto params = match_pattern(route.pattern, request);
    if (!params) continue;
    // "/v1/jobs/slow" is not "/v1/jobs/{id}", whatever the methods.
    if (fixed && !params->empty()) continue;
    if (params->empty() && !std::exchange(fixed, true)) match = {};
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
