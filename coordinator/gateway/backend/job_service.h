// The gateway's interface to the queue and the result store, so that tests of handlers need no Redis. Call every
// function on the gateway's executor; none blocks.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shared/core/result.h"
#include "shared/queue/client.h"
#include "shared/queue/types.h"
#include "shared/results/store.h"

namespace ditfleet::config {
struct Settings;
}

namespace ditfleet::gateway {

namespace asio = boost::asio;

// Errors are those of queue::Client and results::Store, with kUnavailable and Redis' address in the message if Redis is
// unavailable. `view` is the tenant whose jobs are visible; empty: every tenant's.
class JobService {
 public:
  virtual ~JobService() = default;
  virtual asio::awaitable<Result<queue::SubmitOutcome>> submit(const queue::Submission& submission) = 0;
  virtual asio::awaitable<Result<queue::CancelOutcome>> cancel(const std::string& id, const std::string& view) = 0;
  virtual asio::awaitable<Result<queue::PauseOutcome>> pause(const std::string& id, const std::string& view) = 0;
  virtual asio::awaitable<Result<queue::PauseOutcome>> resume(const std::string& id, const std::string& view) = 0;
  // Copies the checkpoint of a unit to the first unit of another job. kNotFound: it has none. kResourceExhausted: many
  // are being copied.
  virtual asio::awaitable<Result<void>> copy_checkpoint(const queue::UnitRef& from, const queue::Submission& to) = 0;
  // Removes that copy.
  virtual asio::awaitable<void> drop_checkpoint(const std::string& job) = 0;
  virtual asio::awaitable<Result<queue::JobRecord>> job(const std::string& id, const std::string& view) = 0;
  virtual asio::awaitable<Result<queue::JobPage>> list(const std::string& view, std::optional<job::State> state,
                                                       int limit, const std::string& cursor, bool oldest_first,
                                                       std::function<bool(const queue::JobRecord&)> keep) = 0;
  // Removes an ended job and its results. Succeeds if they are gone already.
  virtual asio::awaitable<Result<void>> forget(const queue::JobRecord& record) = 0;
  virtual asio::awaitable<Result<std::vector<queue::Event>>> events(const std::string& id, const std::string& after,
                                                                    int limit) = 0;
  virtual asio::awaitable<Result<queue::Event>> event(const std::string& id, const std::string& event_id) = 0;
  virtual asio::awaitable<Result<std::vector<queue::WorkerInfo>>> workers() = 0;  // with tenants
  virtual asio::awaitable<Result<void>> set_desired(const queue::WorkerInfo& worker, queue::Desired desired) = 0;
  virtual asio::awaitable<Result<std::optional<queue::FleetForecast>>> forecast() = 0;
  virtual asio::awaitable<Result<std::map<std::string, queue::JobOutlook>>> outlook() = 0;
  virtual asio::awaitable<Result<std::map<std::string, queue::TenantUse>>> use() = 0;
  virtual asio::awaitable<Result<queue::HistoryPage>> history(const std::string& after, int limit) = 0;
  // results::Store::get_piece().
  virtual asio::awaitable<Result<std::string>> result_piece(const results::Manifest& manifest, std::int64_t offset,
                                                            std::int64_t size) = 0;
  // results::Store::link() and link_origin().
  virtual std::string result_link(const results::Manifest& manifest, std::int64_t life_s) = 0;
  virtual std::string result_origin() = 0;
  // kNotFound: the result has expired.
  virtual asio::awaitable<Result<std::string>> result(const results::Manifest& manifest) = 0;
  virtual asio::awaitable<Result<std::string>> preview(const std::string& key) = 0;
  // Images of a tenant. An image of another tenant does not exist (kNotFound).
  // kResourceExhausted: over the tenant's quota, or the memory of Redis is kept for jobs.
  virtual asio::awaitable<Result<void>> put_input(const std::string& tenant, const std::string& sha256,
                                                  std::string bytes) = 0;
  virtual asio::awaitable<Result<void>> touch_input(const std::string& tenant, const std::string& sha256) = 0;
  virtual asio::awaitable<Result<std::string>> input(const std::string& tenant, const std::string& sha256) = 0;
  virtual asio::awaitable<Result<void>> remove_input(const std::string& tenant, const std::string& sha256) = 0;
  virtual asio::awaitable<Result<std::map<std::string, std::int64_t>>> inputs(const std::string& tenant) = 0;
  // The image at an s3:// URL. kInvalidArgument: the tenant may not use it, or it is no such URL. kNotFound.
  // kPayloadTooLarge: above `most` bytes. kResourceExhausted: many are being fetched.
  virtual asio::awaitable<Result<std::string>> s3_input(const std::string& tenant, const std::string& url,
                                                        std::int64_t most) = 0;
  // Whether Redis has room for an upload: above three quarters of its maxmemory, only jobs and results get more, and
  // above nine tenths only results. kResourceExhausted: it has not.
  virtual asio::awaitable<Result<void>> check_room() = 0;
  // Removes images whose time is over, keeps the checkpoints of paused jobs, and measures the memory of Redis. To be
  // called every second.
  // sweep_results() is results::Store::maintain().
  virtual asio::awaitable<void> maintain() = 0;
  virtual asio::awaitable<void> sweep_results() = 0;
  // The secret with this id that all gateways share (LinkSigner). A missing one is created and lasts `life_s`.
  virtual asio::awaitable<Result<std::string>> link_secret(std::int64_t id, std::int64_t life_s) = 0;
};

// Over Redis. A call takes at most 5 s, 1 s while Redis is not connected.
std::unique_ptr<JobService> make_job_service(std::shared_ptr<queue::Client> queue,
                                             std::shared_ptr<results::Store> store,
                                             std::shared_ptr<redis::Connection> redis,
                                             const config::Settings& settings);

}  // namespace ditfleet::gateway
