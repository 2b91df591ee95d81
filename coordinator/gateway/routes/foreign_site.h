// Protects a gateway without keys from web pages of other sites in its users' browsers: cross-site requests and DNS
// rebinding. With keys the bearer key protects, because a browser adds it to no request of a foreign page.
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

// Whether a client on this host sent the request itself. Proxies add a header about their client or keep its Host.
bool is_from_this_host(const Request& request);

}  // namespace ditfleet::gateway
