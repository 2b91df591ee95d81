// Handles one Request: matches the route, authenticates, calls the handler, adds the common headers, counts and logs.
// Uses no sockets.
//
// Call every function on the gateway's executor. Never throws because of a client's input.
#pragma once

#include <list>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "coordinator/gateway/routes/api_context.h"
#include "coordinator/gateway/routes/router.h"
#include "coordinator/gateway/webhooks/deliverer.h"

namespace ditfleet::gateway {

class Api {
 public:
  // `service` must outlive this object. `local_url`: see ApiContext.
  Api(GatewayDependencies dependencies, JobService& service, std::shared_ptr<EventHub> hub, std::string local_url);
  Api(const Api&) = delete;
  Api& operator=(const Api&) = delete;

  asio::awaitable<Response> handle(Request request);
  // The response to an invalid request (ServerHandlers::refuse). It is counted like any other response.
  Response refuse(int status, const std::string& message, const std::string& code) const;
  // The response to a request that its head already rules out: its route, site or key. The body need not be read.
  std::optional<Response> refuse_head(const Request& head) const;
  // Whether the route is one that must always answer.
  bool is_vital(const Request& head) const;
  // Whether the handler of this request reads the body itself, as uploads of adapters do.
  bool wants_stream(const Request& head) const;
  const std::set<std::string>& tenants() const { return context_.keys.tenants(); }
  bool knows_keys() const { return !context_.keys.awaits_added(); }
  const Router& router() const { return router_; }
  asio::awaitable<void> follow_keys() { return context_.key_store->follow(); }  // with dependencies.redis only
  Deliverer& deliverer() { return *deliverer_; }                                // the same
  asio::awaitable<void> export_usage() { return gateway::export_usage(context_); }
  LinkSigner& signer() { return context_.signer; }
  std::int64_t link_life_s() const { return context_.link_life_s(); }

 private:
  std::shared_ptr<Call> begin(Request request) const;
  std::optional<Response> check(Call& call) const;  // of everything but the body; sets the caller
  asio::awaitable<Response> respond(std::shared_ptr<Call> call);
  asio::awaitable<void> add_limits(std::string tenant, bool refused, std::int64_t reset_s, Response& response);
  Result<Caller> authenticate(const Call& call) const;
  Result<Caller> authenticate_scraper(const Request& request) const;
  void finish(const Call& call, Response& response) const;
  // Ends the response as soon as its caller's key is revoked, until the result is destroyed.
  std::shared_ptr<void> hold(const Call& call, Sink& client);
  void hold_stream(CallPtr call, Response& response);
  void end_refused();

  ApiContext context_;
  Router router_;
  std::map<std::string, queue::TenantUse> uses_;  // as it was read last
  Deadline uses_stale_ = Deadline::after({});
  std::unique_ptr<Deliverer> deliverer_;  // null without Redis
  std::list<std::pair<const Caller*, Sink*>> held_;
};

}  // namespace ditfleet::gateway
