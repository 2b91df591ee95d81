#include "coordinator/gateway/backend/job_service.h"

#include <sodium.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "coordinator/gateway/backend/link_signer.h"
#include "coordinator/gateway/backend/redis_error.h"
#include "coordinator/gateway/backend/s3_url.h"
#include "shared/config/settings.h"
#include "shared/core/excerpt.h"
#include "shared/core/text.h"
#include "shared/queue/keys.h"
#include "shared/redis/connection.h"
#include "shared/redis/info.h"
#include "shared/results/checkpoint.h"
#include "shared/results/verification.h"
#include "shared/s3/client.h"

namespace ditfleet::gateway {
namespace {

constexpr std::chrono::seconds kInputTimeout{30}, kSweepTimeout{60};
constexpr int kMostFetches = 16;  // of images from S3, at a time
constexpr int kMostCopies = 4;    // of checkpoints

class QueueJobService final : public JobService {
 public:
  QueueJobService(std::shared_ptr<queue::Client> queue, std::shared_ptr<results::Store> store,
                  std::shared_ptr<redis::Connection> redis, const config::Settings& settings)
      : queue_(std::move(queue)), store_(std::move(store)), redis_(std::move(redis)), settings_(settings) {}

  asio::awaitable<Result<queue::SubmitOutcome>> submit(const queue::Submission& submission) override {
    if (auto room = co_await check_memory(90); !room) co_return translate(Result<queue::SubmitOutcome>(room.error()));
    auto outcome = co_await queue_->submit(submission, deadline());
    if (!outcome && outcome.error().source == Source::kHere) co_return outcome;
    // Redis may have executed a command that it did not answer.
    co_return translate(std::move(outcome), submission.idempotency_key.empty()
                                                ? "the job may have been submitted: check /v1/jobs, and use an "
                                                  "Idempotency-Key to make retries safe"
                                                : "try again with the same Idempotency-Key");
  }
  asio::awaitable<Result<queue::CancelOutcome>> cancel(const std::string& id, const std::string& view) override {
    co_return translate(co_await queue_->cancel(id, view, deadline()));
  }
  asio::awaitable<Result<queue::PauseOutcome>> pause(const std::string& id, const std::string& view) override {
    co_return translate(co_await queue_->pause(id, view, deadline()), "repeat the request");
  }
  asio::awaitable<Result<queue::PauseOutcome>> resume(const std::string& id, const std::string& view) override {
    co_return translate(co_await queue_->resume(id, view, deadline()), "repeat the request");
  }
  asio::awaitable<Result<void>> copy_checkpoint(const queue::UnitRef& from, const queue::Submission& to) override {
    const auto counted = count_in(copies_, kMostCopies, "checkpoints are being copied");
    if (!counted) co_return counted.error();
    const auto text = co_await queue_->checkpoint(from, deadline());
    if (!text) co_return translate(Result<void>(text.error()));
    if (text->empty()) co_return not_found("it has no checkpoint");
    auto checkpoint = results::Checkpoint::parse(*text);
    if (!checkpoint) co_return checkpoint.error();
    auto state = co_await store_->get(checkpoint->manifest, deadline());
    if (!state) co_return translate_stored(Result<void>(state.error()));
    const results::ResultKey key{to.id, 0, "branch", to.tenant};
    auto copy = co_await store_->put(key, std::move(*state), checkpoint->manifest.media_type, deadline());
    if (!copy) co_return translate_stored(Result<void>(copy.error()));
    checkpoint->manifest = std::move(*copy);
    const queue::UnitRef unit{to.id, 0};
    const std::string record = checkpoint->to_json();
    co_return translate(co_await queue_->give_checkpoint(unit, record, deadline()));
  }
  asio::awaitable<void> drop_checkpoint(const std::string& job) override {
    const queue::UnitRef unit{job, 0};
    const auto text = co_await queue_->checkpoint(unit, deadline());
    const auto checkpoint = text ? results::Checkpoint::parse(*text) : Result<results::Checkpoint>(text.error());
    if (!checkpoint) co_return;  // it expires
    (void)co_await queue_->drop_checkpoint(unit, deadline());
    (void)co_await store_->remove(checkpoint->manifest, deadline());
  }
  asio::awaitable<Result<queue::JobRecord>> job(const std::string& id, const std::string& view) override {
    co_return translate(co_await queue_->job(id, view, deadline()));
  }
  asio::awaitable<Result<queue::JobPage>> list(const std::string& view, std::optional<job::State> state, int limit,
                                               const std::string& cursor, bool oldest_first,
                                               std::function<bool(const queue::JobRecord&)> keep) override {
    co_return translate(co_await queue_->list(view, state, limit, cursor, deadline(), oldest_first, std::move(keep)));
  }
  asio::awaitable<Result<void>> forget(const queue::JobRecord& record) override {
    for (const auto& unit : record.unit_records) {
      const auto manifest = results::Manifest::parse(unit.manifest);
      if (unit.state != job::State::kSucceeded || !manifest) continue;
      auto removed = co_await store_->remove(*manifest, deadline());
      if (!removed) co_return translate_stored(std::move(removed));
    }
    const auto gone = co_await queue_->forget(record.id, deadline());
    if (!gone) co_return translate(Result<void>(gone.error()), "repeat the request");
    co_return Result<void>();
  }
  asio::awaitable<Result<std::vector<queue::Event>>> events(const std::string& id, const std::string& after,
                                                            int limit) override {
    co_return translate(co_await queue_->events(id, after, limit, deadline()));
  }
  asio::awaitable<Result<queue::Event>> event(const std::string& id, const std::string& event_id) override {
    co_return translate(co_await queue_->event(id, event_id, deadline()));
  }
  asio::awaitable<Result<std::vector<queue::WorkerInfo>>> workers() override {
    co_return translate(co_await queue_->workers(deadline(), true));
  }
  asio::awaitable<Result<void>> set_desired(const queue::WorkerInfo& worker, queue::Desired desired) override {
    co_return translate(co_await queue_->set_desired(worker, desired, deadline()), "repeat the request");
  }
  asio::awaitable<Result<std::optional<queue::FleetForecast>>> forecast() override {
    co_return translate(co_await queue_->forecast(deadline()));
  }
  asio::awaitable<Result<std::map<std::string, queue::JobOutlook>>> outlook() override {
    co_return translate(co_await queue_->outlook(deadline()));
  }
  asio::awaitable<Result<std::map<std::string, queue::TenantUse>>> use() override {
    co_return translate(co_await queue_->use(deadline()));
  }
  asio::awaitable<Result<queue::HistoryPage>> history(const std::string& after, int limit) override {
    co_return translate(co_await queue_->history(after, limit, deadline()));
  }
  asio::awaitable<Result<std::string>> result_piece(const results::Manifest& manifest, std::int64_t offset,
                                                    std::int64_t size) override {
    co_return translate_stored(co_await store_->get_piece(manifest, offset, size, deadline()));
  }
  asio::awaitable<Result<std::string>> result(const results::Manifest& manifest) override {
    co_return translate_stored(co_await store_->get(manifest, deadline()));
  }
  std::string result_link(const results::Manifest& manifest, std::int64_t life_s) override {
    return store_->link(manifest, life_s);
  }
  std::string result_origin() override { return store_->link_origin(); }
  asio::awaitable<Result<std::string>> preview(const std::string& key) override {
    co_return translate_stored(co_await store_->get_preview(key, deadline()));
  }
  asio::awaitable<Result<void>> put_input(const std::string& tenant, const std::string& sha256,
                                          std::string bytes) override {
    const auto own = config::quotas_of(settings_, tenant);
    queue::InputQuota quota{own.inputs, own.input_bytes};
    if (settings_.results.backend == "redis") {
      co_await measure_memory();
      if (auto room = co_await check_room(); !room) co_return translate(std::move(room));
      if (memory_.most > 0) quota.bytes = std::min(quota.bytes, memory_.most / 4);
    }
    const auto added = co_await queue_->keep_input(tenant, sha256, static_cast<std::int64_t>(bytes.size()),
                                                   settings_.results.input_ms, quota, deadline());
    if (!added) co_return translate(Result<void>(added.error()));
    auto stored = co_await store_->put_input(sha256, std::move(bytes), deadline());
    if (!stored && *added) (void)co_await remove_input(tenant, sha256);  // otherwise it expires
    co_return translate_stored(std::move(stored));
  }
  asio::awaitable<Result<void>> touch_input(const std::string& tenant, const std::string& sha256) override {
    const auto kept = co_await queue_->keep_input(tenant, sha256, 0, settings_.results.input_ms, {}, deadline());
    if (!kept) co_return not_kept(kept.error(), sha256);
    co_return translate_stored(co_await store_->touch_input(sha256, deadline()));
  }
  asio::awaitable<Result<std::string>> input(const std::string& tenant, const std::string& sha256) override {
    if (auto own = co_await touch_input(tenant, sha256); !own) co_return own.error();
    co_return translate_stored(co_await store_->get_input(sha256, deadline()));
  }
  asio::awaitable<Result<void>> remove_input(const std::string& tenant, const std::string& sha256) override {
    const auto gone = co_await queue_->remove_input(tenant, sha256, deadline());
    if (!gone) co_return not_kept(gone.error(), sha256);
    if (!*gone) co_return Result<void>();
    co_return translate_stored(co_await store_->remove_input(sha256, deadline()));
  }
  asio::awaitable<Result<std::map<std::string, std::int64_t>>> inputs(const std::string& tenant) override {
    co_return translate(co_await queue_->inputs(tenant, deadline()));
  }
  asio::awaitable<Result<std::string>> s3_input(const std::string& tenant, const std::string& url,
                                                std::int64_t most) override {
    auto allowed = s3_object(url, config::s3_inputs_of(settings_, tenant));
    if (!allowed) co_return allowed.error();
    const auto counted = count_in(fetches_, kMostFetches, "images are being fetched from S3");
    if (!counted) co_return counted.error();
    if (!s3_) s3_ = std::make_unique<s3::Client>(results::store_options(settings_).s3);
    auto bytes = co_await s3_->get(allowed->first, allowed->second, 0, most + 1, Deadline::after(kInputTimeout));
    if (bytes && static_cast<std::int64_t>(bytes->size()) > most)
      co_return Error{Code::kPayloadTooLarge, "'" + excerpt(url, 200) + "' has more than " + std::to_string(most) +
                                                  " bytes, which is results.input_max_bytes"};
    co_return bytes;
  }
  asio::awaitable<Result<void>> check_room() override { return check_memory(75); }
  asio::awaitable<void> maintain() override {
    if (const auto gone = co_await queue_->expire_inputs(deadline())) {
      for (const std::string& sha256 : *gone) (void)co_await store_->remove_input(sha256, deadline());
    }
    if (next_touch_.passed()) {
      // Well before they expire; several gateways may do so.
      next_touch_ = Deadline::after(std::chrono::milliseconds(settings_.queue.retention_ms / 8));
      const auto texts = co_await queue_->keep_checkpoints(deadline());
      for (const std::string& text : texts ? *texts : std::vector<std::string>()) {
        if (const auto checkpoint = results::Checkpoint::parse(text))
          (void)co_await store_->touch(checkpoint->manifest, deadline());
      }
    }
    co_await measure_memory();
  }
  asio::awaitable<void> sweep_results() override { return store_->maintain(Deadline::after(kSweepTimeout)); }
  asio::awaitable<Result<std::string>> link_secret(std::int64_t id, std::int64_t life_s) override {
    std::string fresh(LinkSigner::kSecretBytes, '\0');
    randombytes_buf(fresh.data(), fresh.size());
    redis::Command command("SET");
    command << queue::Keys(queue_->options().shard).link_secret(id) << fresh << "NX"
            << "GET"
            << "EX" << life_s;
    auto reply = co_await redis_->execute(std::move(command), deadline());
    if (!reply) co_return reply.error();
    co_return reply->is_nil() ? fresh : std::move(reply->text);
  }

 private:
  // Counts one more that runs, until the result is gone: each takes memory that no request was counted for.
  // kResourceExhausted: `most` run.
  static Result<std::shared_ptr<void>> count_in(int& running, int most, const char* what) {
    if (running >= most)
      return Error{.code = Code::kResourceExhausted,
                   .message = std::to_string(running) + " " + what + "; try again shortly",
                   .retry_after = std::chrono::seconds(1)};
    ++running;
    return std::shared_ptr<void>(nullptr, [&running](void*) { --running; });
  }
  asio::awaitable<void> measure_memory() {
    const auto info = co_await redis_->execute(redis::Command("INFO") << "memory", deadline());
    if (!info) co_return;
    memory_ = {leading_integer(redis::info_value(info->text, "used_memory")),
               leading_integer(redis::info_value(info->text, "maxmemory"))};
  }

  asio::awaitable<Result<void>> check_memory(int percent) {
    const auto full = [&] { return memory_.most > 0 && memory_.used * 100 >= memory_.most * percent; };
    if (full()) co_await measure_memory();
    if (!full()) co_return Result<void>();
    co_return Error{.code = Code::kResourceExhausted,
                    .message = "it uses " + std::to_string(memory_.used) + " of " + std::to_string(memory_.most) +
                               " bytes; above " + std::to_string(percent) + " % the rest is for " +
                               (percent < 90 ? "jobs and results" : "results of accepted jobs"),
                    .source = Source::kRedis};
  }

  // An image that the tenant does not have answers like one that nobody has.
  Error not_kept(const Error& error, const std::string& sha256) const {
    if (error.code == Code::kNotFound) return results::input_gone(sha256);
    return translate(Result<void>(error)).error();
  }

  Deadline deadline() const {
    // A short reconnect should not fail a request, but an unavailable Redis should be reported soon.
    return Deadline::after(redis_->connected() ? std::chrono::seconds(5) : std::chrono::seconds(1));
  }

  template <class T>
  Result<T> translate(Result<T> result, const char* unanswered = "nothing was lost, try again shortly") const {
    if (result) return result;
    return redis_error(result.error(), "the queue's Redis (" + redis_->options().endpoint.display() + ")", unanswered,
                       "raise its maxmemory, remove uploads (DELETE /v1/uploads/{id}), or wait until ended jobs expire "
                       "(queue.retention_ms)");
  }

  // Results are in Redis, in files or in S3; only errors of Redis need a translation.
  template <class T>
  Result<T> translate_stored(Result<T> result) const {
    const bool redis =
        !result && (result.error().source == Source::kRedis || result.error().source == Source::kRedisConnection);
    return redis ? translate(std::move(result)) : result;
  }

  std::shared_ptr<queue::Client> queue_;
  std::shared_ptr<results::Store> store_;
  std::shared_ptr<redis::Connection> redis_;
  config::Settings settings_;
  std::unique_ptr<s3::Client> s3_;  // of s3_input(); made when it is needed
  int fetches_ = 0, copies_ = 0;
  Deadline next_touch_ = Deadline::after({});
  struct {
    std::int64_t used = 0, most = 0;  // 0: unlimited, or unknown
  } memory_;
};

}  // namespace

std::unique_ptr<JobService> make_job_service(std::shared_ptr<queue::Client> queue,
                                             std::shared_ptr<results::Store> store,
                                             std::shared_ptr<redis::Connection> redis,
                                             const config::Settings& settings) {
  return std::make_unique<QueueJobService>(std::move(queue), std::move(store), std::move(redis), settings);
}

}  // namespace ditfleet::gateway
