// Workers: list, drain, resume, stop; the numbers for an autoscaler.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <set>

#include "coordinator/gateway/routes/api_context.h"
#include "coordinator/gateway/routes/errors.h"
#include "shared/core/excerpt.h"
#include "shared/core/nearest_name.h"
#include "shared/core/text.h"
#include "shared/loras/registry_mirror.h"

namespace ditfleet::gateway {
namespace {

constexpr std::int64_t kScalingSeconds = 60, kMostScalingSeconds = 86'400;

// As the caller may see it: all tenants share the workers, but each sees only its own jobs on them.
json::object visible_json(const ApiContext& context, const Call& call, queue::WorkerInfo worker,
                          const Result<std::optional<queue::FleetForecast>>& forecast) {
  // The last reported state is obsolete: the scheduler gives a silent worker no units.
  if (worker.unheard_ms > config::silent_after_ms(context.dependencies.settings)) worker.state = "silent";
  const auto visible = [&](const std::string& id) {
    const auto tenant = worker.tenants.find(id);
    return call.caller.sees_all || (tenant != worker.tenants.end() && tenant->second == call.caller.tenant);
  };
  json::object out = worker_json(worker, visible, forecast ? *forecast : std::nullopt);
  out["speed"] = speed_value(context.hub->history().speed_of(worker.name, unix_ms()));
  return out;
}

asio::awaitable<Result<Response>> list_workers(const ApiContext& context, CallPtr call) {
  auto workers = co_await context.service.workers();
  if (!workers) co_return workers.error();
  const auto forecast = co_await context.service.forecast();
  if (!call->caller.sees_all) {
    // Another tenant's digest would reveal to anyone who has the same file who uses it.
    std::set<std::string> own;
    const auto listed = context.dependencies.adapters->list(call->caller.tenant);
    for (const loras::Adapter& adapter : listed.adapters) own.insert(adapter.sha256);
    for (auto& worker : *workers) {
      for (auto* digests : {&worker.adapters, &worker.host_adapters}) {
        std::erase_if(*digests, [&](const std::string& digest) { return !own.contains(digest); });
      }
    }
  }
  json::array array;
  for (auto& worker : *workers) array.push_back(visible_json(context, *call, std::move(worker), forecast));
  co_return json_response(200, {{"workers", std::move(array)}}).with("Cache-Control", "no-store");
}

// `act`: the past tense, for the audit log.
asio::awaitable<Result<Response>> change(const ApiContext& context, CallPtr call, queue::Desired desired,
                                         const char* act) {
  auto workers = co_await context.service.workers();
  if (!workers) co_return workers.error();
  const std::string& name = call->param(0);
  const auto worker = std::find_if(workers->begin(), workers->end(), [&](const auto& w) { return w.name == name; });
  if (worker == workers->end()) {
    std::vector<std::string> names;
    for (const auto& one : *workers) names.push_back(one.name);
    const std::string near = nearest_name(name, names);
    co_return Error{Code::kNotFound,
                    "no worker '" + excerpt(name, 100) + "' is registered; " +
                        (near.empty() ? "see GET /v1/workers" : "did you mean '" + near + "'?"),
                    {}};
  }
  if (auto done = co_await context.service.set_desired(*worker, desired); !done) co_return done.error();
  spdlog::info("audit: {} of tenant '{}' {} worker '{}', request {}",
               call->caller.key.empty() ? "nobody's key" : "key " + call->caller.key, call->caller.tenant, act, name,
               call->request_id);
  const auto forecast = co_await context.service.forecast();
  co_return json_response(202, visible_json(context, *call, std::move(*worker), forecast))
      .with("Cache-Control", "no-store");
}

// A unit runs on one worker, so more workers than units would be idle.
std::int64_t workers_needed(std::int64_t backlog_us, std::int64_t units, std::int64_t seconds) {
  const std::int64_t window_us = seconds * 1'000'000;
  return std::min(units, (backlog_us + window_us - 1) / window_us);
}

json::object scaling_json(const queue::FleetForecast::Model& model, std::int64_t seconds) {
  return {{"backlog_gpu_seconds", static_cast<double>(model.backlog_us) / 1e6},
          {"units", model.units},
          {"ready_workers", model.ready_workers},
          {"workers_needed", workers_needed(model.backlog_us, model.units, seconds)}};
}

asio::awaitable<Result<Response>> scaling(const ApiContext& context, CallPtr call) {
  std::int64_t seconds = kScalingSeconds;
  for (const auto& [name, value] : call->request.query) {
    if (name != "seconds") co_return invalid_argument("unknown parameter '" + name + "'; supported is seconds", name);
    const auto asked = number_of<std::int64_t>(value, 1, kMostScalingSeconds);
    if (!asked) {
      co_return invalid_argument("seconds is '" + excerpt(value, 40) + "'; it must be a whole number from 1 to " +
                                     std::to_string(kMostScalingSeconds),
                                 "seconds");
    }
    seconds = *asked;
  }
  const auto forecast = co_await context.service.forecast();
  if (!forecast) co_return forecast.error();
  // Not zeros: an autoscaler would stop the workers.
  if (!*forecast) co_return unavailable("no coordinator leads the shard, so the backlog is unknown; try again shortly");
  queue::FleetForecast::Model all{.ready_workers = (*forecast)->ready_workers};
  json::object models;
  for (const auto& [name, model] : (*forecast)->models) {
    all.backlog_us += model.backlog_us;
    all.units += model.units;
    models[name] = scaling_json(model, seconds);
  }
  json::object body = scaling_json(all, seconds);
  body["seconds"] = seconds;
  body["models"] = std::move(models);
  co_return json_response(200, body).with("Cache-Control", "no-store");
}

}  // namespace

void add_worker_routes(Router& router) {
  router.add({"GET", "/v1/workers", list_workers});
  const auto add = [&](std::string_view pattern, queue::Desired desired, const char* act) {
    const auto handler = [desired, act](const ApiContext& context, CallPtr call) {
      return change(context, std::move(call), desired, act);
    };
    router.add({"POST", pattern, handler, Access::kAdministrator});
  };
  add("/v1/workers/{name}/drain", queue::Desired::kDraining, "drained");
  add("/v1/workers/{name}/resume", queue::Desired::kReady, "resumed");
  add("/v1/workers/{name}/stop", queue::Desired::kStopped, "stopped");
  router.add({"GET", "/v1/scaling", scaling});
}

}  // namespace ditfleet::gateway
