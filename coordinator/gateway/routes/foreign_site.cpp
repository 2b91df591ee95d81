#include "coordinator/gateway/routes/foreign_site.h"

#include <algorithm>

#include "coordinator/gateway/routes/errors.h"
#include "shared/core/excerpt.h"
#include "shared/core/listen_address.h"
#include "shared/core/text.h"

namespace ditfleet::gateway {
namespace {

// "https://Example.org:80/path" → "example.org:80"; also of text without a scheme.
std::string authority_of(std::string_view url) {
  const auto scheme = url.find("://");
  if (scheme != std::string_view::npos) url.remove_prefix(scheme + 3);
  return lower_case(url.substr(0, url.find_first_of("/?#")));
}

// "example.org:80" → "example.org", "[::1]:80" → "::1"
std::string host_of(const std::string& authority) {
  const auto close = authority.find(']');
  if (authority.starts_with('[') && close != std::string::npos) return authority.substr(1, close - 1);
  return authority.substr(0, authority.find(':'));
}

}  // namespace

std::optional<Response> refuse_foreign_site(const Request& request, const config::Settings& settings) {
  const auto& gateway = settings.gateway;
  const std::string asked = authority_of(request.header("Host")), known = authority_of(gateway.public_url);
  const std::string host = host_of(asked);
  const auto listen = ListenAddress::parse(gateway.listen);
  // HTTP/1.0 has no Host, and no browser speaks it.
  const bool served = asked.empty() || is_loopback(host) || (!known.empty() && host == host_of(known)) ||
                      (listen && host == listen->host) || (gateway.open && is_ip_address(host));
  if (!served) {
    return status_response(403,
                           "this gateway does not serve the host '" + excerpt(host, 100) +
                               "'; use localhost, set gateway.public_url to the URL that clients use, or configure "
                               "keys",
                           "foreign_host");
  }
  const std::string origin = authority_of(request.header("Origin"));
  const bool reads = request.method == "GET" || request.method == "HEAD";
  if ((!origin.empty() && origin != asked && origin != known) ||
      (!reads && request.header("Sec-Fetch-Site") == "cross-site")) {
    return status_response(403,
                           "a page of another site (Origin '" + excerpt(origin, 100) +
                               "') made this request; set gateway.public_url if that is this gateway's address, or "
                               "configure keys",
                           "foreign_site");
  }
  return std::nullopt;
}

void allow_origin(const Request& request, const config::Settings& settings, Response& response) {
  const std::string& allowed = settings.gateway.allowed_origins;
  if (allowed.empty()) return;
  response.with("Vary", "Origin");
  const std::string origin = lower_case(request.header("Origin"));
  const auto origins = split(allowed, ',');
  const bool any = std::any_of(origins.begin(), origins.end(),
                               [&](std::string_view one) { return one == "*" || lower_case(one) == origin; });
  if (origin.empty() || !any) return;
  response.with("Access-Control-Allow-Origin", std::string(request.header("Origin")));
  const std::string_view method = request.header("Access-Control-Request-Method");
  if (request.method != "OPTIONS" || method.empty()) {
    response.with("Access-Control-Expose-Headers",
                  "ETag, Idempotent-Replayed, Location, Retry-After, traceparent, X-Job-Id, X-Request-Id, "
                  "x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests");
    return;
  }
  response.with("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE");
  const std::string_view headers =
      request.header("Access-Control-Request-Headers");  // clients send headers of their own
  if (!headers.empty()) response.with("Access-Control-Allow-Headers", std::string(headers));
  response.with("Access-Control-Max-Age", "600");
}

bool is_from_this_host(const Request& request) {
  const bool forwarded = std::any_of(request.headers.begin(), request.headers.end(), [](const auto& header) {
    const std::string name = lower_case(header.first);  // Forwarded, X-Real-IP, CF-Connecting-IP, X-Azure-ClientIP …
    return name.find("forward") != name.npos || name == "via" || name == "cdn-loop" || name.starts_with("cf-") ||
           name.starts_with("x-envoy-") || name.starts_with("x-original-") || name.ends_with("ip") ||
           name.ends_with("-addr");
  });
  return request.from_loopback && !forwarded && is_loopback(host_of(authority_of(request.header("Host"))));
}

}  // namespace ditfleet::gateway
