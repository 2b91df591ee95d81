// Jobs, workers and models as the JSON of the native routes (openapi.json). Pure functions, thread-safe.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "coordinator/gateway/backend/link_signer.h"
#include "coordinator/gateway/events/fleet_history.h"
#include "shared/core/json.h"
#include "shared/job/catalogue.h"
#include "shared/queue/types.h"
#include "shared/results/store.h"

namespace ditfleet::gateway {

// Makes the URLs of a job for one client.
struct JobLinks {
  std::string base;                    // "http://host:port", no slash at the end
  const LinkSigner* signer = nullptr;  // null: links are not signed
  std::int64_t expires_s = 0;          // when a signed link expires
  // The store's link to a result; empty, or returns an empty text: the gateway sends the result.
  std::function<std::string(const results::Manifest&)> stored = {};

  std::string job(std::string_view id) const;
  std::string result(std::string_view id, int unit, const results::Manifest& manifest) const;
  std::string preview(std::string_view id, std::string_view event) const;
};

// What a unit that has not started waits for, as a phrase; empty: unknown.
using WaitsFor = std::function<std::string(const queue::UnitRef&)>;

const queue::UnitRecord* find_unit(const queue::JobRecord& record, int unit);  // null: no such unit

// `with_units`: includes "unit_records". Records from list() have none.
json::object job_json(const queue::JobRecord& record, const JobLinks& links, bool with_units,
                      const WaitsFor& waits_for = {});

// 0 … 1 over all units, in parts of the predicted run; 1 for an ended job. `pace`: null if none of the job's class was
// observed; then what follows the last step counts as one step.
double progress_of(const queue::JobRecord& record, const FleetHistory::Pace* pace, std::int64_t now_ms);

// "denoising", "decoding"; empty unless a worker runs the unit.
std::string_view phase_of(const queue::UnitRecord& unit);

// Why a job ended without success.
Error cause_of(const queue::JobRecord& record);

// `visible`: whether the caller may see a job. `forecast`: empty while no coordinator leads.
json::object worker_json(const queue::WorkerInfo& worker, const std::function<bool(const std::string&)>& visible,
                         const std::optional<queue::FleetForecast>& forecast);

// A worker's speed with three digits; null: unknown.
json::value speed_value(std::optional<double> speed);

// OpenAI's model object, extended by the model's limits and defaults.
json::object model_json(const job::ModelEntry& model, std::int64_t created_s);

}  // namespace ditfleet::gateway
