#include "coordinator/gateway/job_service.h"

#include <chrono>
#include <utility>

#include "shared/redis/connection.h"

namespace ditfleet::gateway {
namespace {

class QueueJobService final : public JobService {
 public:
  QueueJobService(std::shared_ptr<queue::Client> queue, std::shared_ptr<results::Store> store,
                  std::shared_ptr<redis::Connection> redis)
      : queue_(std::move(queue)), store_(std::move(store)), redis_(std::move(redis)) {}

  asio::awaitable<Result<queue::SubmitOutcome>> submit(const queue::Submission& submission) override {
    auto outcome = co_await queue_->submit(submission, deadline());
    // Sent and not answered: it may have been taken.
    co_return told(std::move(outcome), submission.idempotency_key.empty()
                                           ? "whether it took the job is not known: /v1/jobs will show it, and an "
                                             "Idempotency-Key makes asking again safe"
                                           : "ask again with the same Idempotency-Key");
  }
  asio::awaitable<Result<queue::CancelOutcome>> cancel(const std::string& id, const std::string& view) override {
    co_return told(co_await queue_->cancel(id, view, deadline()));
  }
  asio::awaitable<Result<queue::JobRecord>> job(const std::string& id, const std::string& view) override {
    co_return told(co_await queue_->job(id, view, deadline()));
  }
  asio::awaitable<Result<queue::JobPage>> list(const std::string& view, std::optional<job::State> state, int limit,
                                               const std::string& cursor) override {
    co_return told(co_await queue_->list(view, state, limit, cursor, deadline()));
  }
  asio::awaitable<Result<std::vector<queue::Event>>> events(const std::string& id, const std::string& after,
                                                            int limit) override {
    co_return told(co_await queue_->events(id, after, limit, deadline()));
  }
  asio::awaitable<Result<std::vector<queue::WorkerInfo>>> workers() override {
    co_return told(co_await queue_->workers(deadline(), true));
  }
  asio::awaitable<Result<std::string>> result(const results::Manifest& manifest) override {
    co_return stored(co_await store_->get(manifest, deadline()));
  }
  asio::awaitable<Result<std::string>> preview(const std::string& key) override {
    co_return stored(co_await store_->get_preview(key, deadline()));
  }

 private:
  Deadline deadline() const {
    // A short reconnect should not fail a request; a Redis that is away should say so soon.
    return Deadline::after(redis_->connected() ? std::chrono::seconds(5) : std::chrono::seconds(1));
  }

  // What is between this service and its Redis is no fault of the caller's.
  template <class T>
  Result<T> told(Result<T> result, const char* advice = "nothing was lost, try again shortly") const {
    if (result) return result;
    const Error error = result.error();
    const std::string redis = "the queue's Redis (" + redis_->options().endpoint.display() + ")",
                      why = " [" + error.message + "]";
    switch (error.code) {
      case Code::kUnavailable:
      case Code::kDeadlineExceeded:
        if (error.source == Source::kRedis)
          return unavailable(redis + " answers, but refuses this just now: nothing was changed, try again shortly" +
                             why);
        return unavailable(redis + " does not answer; " + advice + why);
      case Code::kPermissionDenied:
        return unavailable(
            redis + " does not let this service in: redis.url needs a user and password with the rights for it" + why);
      case Code::kResourceExhausted:
        return Error{error.code,
                     redis +
                         " is at its memory limit; raise its maxmemory, or wait until ended jobs are forgotten "
                         "(queue.retention_ms)" +
                         why,
                     {}};
      default: return error;
    }
  }

  // Results lie in Redis or in a folder; a folder's errors are its own.
  template <class T>
  Result<T> stored(Result<T> result) const {
    if (result || result.error().source != Source::kHere) return told(std::move(result));
    return result;
  }

  std::shared_ptr<queue::Client> queue_;
  std::shared_ptr<results::Store> store_;
  std::shared_ptr<redis::Connection> redis_;
};

}  // namespace

std::unique_ptr<JobService> make_job_service(std::shared_ptr<queue::Client> queue,
                                             std::shared_ptr<results::Store> store,
                                             std::shared_ptr<redis::Connection> redis) {
  return std::make_unique<QueueJobService>(std::move(queue), std::move(store), std::move(redis));
}

}  // namespace ditfleet::gateway
