// The table of routes, and the state of one request. Thread-safe once all routes are added.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/gateway/http/http.h"
#include "coordinator/gateway/routes/auth.h"
#include "shared/core/deadline.h"

namespace ditfleet::gateway {

struct ApiContext;
struct Call;
using CallPtr = std::shared_ptr<const Call>;
// The context outlives the router. Never throws because of a client's input.
using Handler = std::function<asio::awaitable<Result<Response>>(const ApiContext&, CallPtr)>;

// Which requests a route accepts if keys are configured.
enum class Access {
  kKey,            // with a key
  kKeyOrLink,      // with a key or a signed link (LinkSigner)
  kAdministrator,  // with an administrator's key
  kOpen,           // any
  kOpenProbe,      // any; requested so often that it is logged at debug level only
  kMetrics,        // with an administrator's key, or from this host (gateway.metrics_listen)
};

struct Route {
  std::string_view method;
  std::string_view pattern;  // "/v1/jobs/{id}", as in openapi.json
  Handler handler;
  Access access = Access::kKey;
  bool streams_body = false;  // the handler reads any body that is not JSON itself (Request::stream)
  bool takes_images = false;  // in JSON, which the handler reads itself if it may be above gateway.max_body_bytes
  // Answered even if the server has too many connections, and whatever host the request names.
  bool vital() const { return access == Access::kOpenProbe || access == Access::kMetrics; }
};

struct RouteMatch {
  const Route* route = nullptr;     // null: no such path, or the path does not support the method
  std::vector<std::string> params;  // the {…} parts in order
  std::string allow;                // the path's methods ("GET, HEAD, OPTIONS"); empty: no such path
  std::string_view pattern;         // of the path, for metrics; empty: no such path
};

class Router {
 public:
  void add(Route route) { routes_.push_back(std::move(route)); }
  const std::vector<Route>& routes() const { return routes_; }
  // GET's route also serves HEAD. OPTIONS has no route; `allow` answers it. The result points into this router.
  RouteMatch match(const Request& request) const;

 private:
  std::vector<Route> routes_;
};

// The state of one request. A response that is sent later shares it.
struct Call {
  Request request;
  RouteMatch match;
  Caller caller;
  std::string request_id, traceparent;
  Deadline::Clock::time_point began = Deadline::Clock::now();

  const std::string& param(std::size_t index) const { return match.params[index]; }
};

}  // namespace ditfleet::gateway
