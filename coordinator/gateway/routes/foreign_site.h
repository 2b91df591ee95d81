// Web pages of other sites in users' browsers. A gateway without keys is protected from them: from cross-site requests
// and DNS rebinding. With keys the bearer key protects, because a browser adds it to no request of a foreign page, and
// pages of allowed origins may use the API (CORS).
//
// Pure functions, thread-safe.
#pragma once

#include <optional>

#include "coordinator/gateway/http/http.h"
#include "shared/config/settings.h"

namespace ditfleet::gateway {

// 403 for a request
// - whose Host is neither localhost, a loopback address, the host of gateway.public_url or gateway.listen nor, with
//   gateway.open, any IP address (DNS rebinding needs a name);
// - whose Origin is neither its Host nor gateway.public_url;
// - that changes something and has Sec-Fetch-Site: cross-site.
std::optional<Response> refuse_foreign_site(const Request& request, const config::Settings& settings);

// Adds the headers by which a browser lets a page of another origin read the response, if gateway.allowed_origins has
// the request's Origin; to a preflight also those that let it send the request.
void allow_origin(const Request& request, const config::Settings& settings, Response& response);

// Whether a client on this host sent the request itself. Proxies add a header about their client or keep its Host.
bool is_from_this_host(const Request& request);

}  // namespace ditfleet::gateway
