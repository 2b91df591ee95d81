// What the gateway gets from the rest of the process.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "shared/config/settings.h"
#include "shared/core/result.h"
#include "shared/job/catalogue.h"
#include "shared/job/spec.h"

namespace ditfleet::queue {
class Client;
struct UnitRef;
}  // namespace ditfleet::queue
namespace ditfleet::loras {
class Registry;
class RegistryMirror;
}  // namespace ditfleet::loras
namespace ditfleet::results {
class Store;
}
namespace ditfleet::redis {
class Connection;
}

namespace ditfleet::gateway {

// Functions must not block. An unset function is not called.
struct GatewayDependencies {
  config::Settings settings;  // gateway.*, queue.retention_ms, worker.heartbeat_ms, loras.*, keys
  job::Catalogue catalogue;
  std::shared_ptr<queue::Client> queue;  // the owner loads its Function library into Redis
  std::shared_ptr<results::Store> store;
  std::shared_ptr<redis::Connection> redis;  // the queue's; the event feed opens another connection
  std::shared_ptr<loras::Registry> loras;
  std::shared_ptr<loras::RegistryMirror> adapters;  // of the same registry; the owner runs follow()
  // Why GET /readyz answers 503 ("Redis at … is not connected"); empty: 200. Unset: always 200.
  std::function<std::vector<std::string>()> unready = {};
  // What an operator should mend although the service is ready; a part of GET /readyz.
  std::function<std::vector<std::string>()> warnings = {};
  // Advises against a job that is about to be submitted: kResourceExhausted with retry_after if the job's deadline
  // cannot be met, kUnavailable if Redis would not keep the job. `spec` is complete. Unset: every job is accepted.
  std::function<Result<void>(const job::JobSpec& spec, const std::string& tenant)> advise = {};
  // Whether this coordinator leads, so that it sends the events of webhooks. Unset: never.
  std::function<bool()> leads = {};
  // What a unit that has not started waits for, as a phrase; empty if unknown.
  std::function<std::string(const queue::UnitRef&)> waits_for = {};
};

}  // namespace ditfleet::gateway
