#include "shared/queue/client.h"

#include "shared/config/settings.h"
#include "shared/queue/calls.h"

namespace ditfleet::queue {

QueueOptions queue_options(const config::Settings& settings) {
  const auto& q = settings.queue;
  return {.lease_ms = q.lease_ms,
          .retention_ms = q.retention_ms,
          .idempotency_ms = q.idempotency_ms,
          .max_age_ms = q.max_age_ms,
          .max_attempts = q.max_attempts,
          .wait_replicas = q.wait_replicas,
          .max_crashes = q.max_crashes,
          .max_lapses = q.max_lapses,
          .retry_backoff_ms = q.retry_backoff_ms,
          .retry_backoff_max_ms = q.retry_backoff_max_ms,
          .history_ms = q.history_days * 86'400'000,
          .history_jobs = q.history_jobs};
}

std::string Quota::packed() const {
  return std::to_string(units) + ' ' + std::to_string(bytes) + ' ' + std::to_string(share) + ' ' +
         std::to_string(max_queued);
}

Client::Client(std::shared_ptr<redis::Connection> connection, QueueOptions options)
    : impl_(std::make_shared<Impl>(std::move(connection), options)) {}
Client::~Client() = default;
const QueueOptions& Client::options() const { return impl_->options_; }

asio::awaitable<Result<void>> Client::load_library(Deadline deadline) {
  const auto impl = impl_;
  co_return co_await impl->load(deadline);
}

}  // namespace ditfleet::queue
