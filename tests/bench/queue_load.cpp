#include "tests/bench/queue_load.h"

#include <sys/resource.h>

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <unordered_map>

#include "shared/core/ids.h"
#include "shared/queue/keys.h"
#include "shared/redis/connection.h"

namespace ditfleet::bench {
namespace {

namespace asio = boost::asio;
using Clock = std::chrono::steady_clock;
using queue::Client;

// As large as the spec of an image that a gateway stores.
constexpr char kSpec[] =
    R"({"model":"flux.1-dev","prompt":"a lighthouse on a cliff above a stormy sea at dusk, oil on canvas, thick brush )"
    R"(strokes, warm light in the windows","n":1,"width":1024,"height":1024,"num_inference_steps":28,)"
    R"("guidance_scale":3.5,"max_sequence_length":512,"seed":1234567890123,)"
    R"("loras":[{"name":"impasto","scale":0.8}],"output_format":"png"})";
constexpr char kTrace[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
constexpr char kManifest[] =
    R"({"backend":"file","key":"a0/lighthouse.png","media_type":"image/png","bytes":1482311,)"
    R"("sha256":"9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08","width":1024,"height":1024,)"
    R"("seed":1234567890123})";
constexpr char kEvents[] = "queued ready assigned started step step step succeeded succeeded ";
constexpr std::size_t kSample = 50;  // jobs whose events are checked at the end

double thread_cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_THREAD, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Thrown in a coroutine of the load, caught in run_load(): the first failure ends the run.
struct Failed : std::exception {
  explicit Failed(Error e) : error(std::move(e)) {}
  Error error;
  const char* what() const noexcept override { return error.message.c_str(); }
};

template <class T>
T must(Result<T> result) {
  if (!result) throw Failed(result.error());
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }

// A counting semaphore for the coroutines of one thread.
class Semaphore {
 public:
  Semaphore(asio::io_context& io, int free) : io_(io), free_(free) {}

  asio::awaitable<void> acquire() {
    if (free_ > 0) {
      --free_;
      co_return;
    }
    asio::steady_timer timer(io_, Clock::time_point::max());
    waiting_.push_back(&timer);
    boost::system::error_code ignored;
    co_await timer.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  }
  void release() {
    if (waiting_.empty()) {
      ++free_;
      return;
    }
    waiting_.front()->cancel();
    waiting_.pop_front();
  }

 private:
  asio::io_context& io_;
  int free_;
  std::deque<asio::steady_timer*> waiting_;
};

class Load {
 public:
  explicit Load(const LoadOptions& options)
      : options_(options), window_(io_, options.window), all_finished_(io_, Clock::time_point::max()) {}

  Result<LoadResult> run() {
    auto endpoint = redis::Endpoint::parse(options_.redis_url);
    if (!endpoint) return endpoint.error();
    connection_options_.endpoint = *endpoint;
    spawn(all());
    const double cpu = thread_cpu_seconds();
    while (!ended_ && !failure_ && io_.run_one() > 0) {
    }
    result_.client_cpu_seconds = thread_cpu_seconds() - cpu;
    if (failure_) return *failure_;
    return std::move(result_);
  }

 private:
  struct Worker {
    Worker(asio::io_context& io, std::unique_ptr<Client> c, std::string name, int places)
        : client(std::move(c)), owner(name + ":" + new_nonce().substr(0, 16)), free(io, places) {}
    std::unique_ptr<Client> client;
    std::string owner;
    Semaphore free;
  };

  void spawn(asio::awaitable<void> task) {
    asio::co_spawn(io_, std::move(task), [this](std::exception_ptr thrown) {
      if (!thrown) return;
      try {
        std::rethrow_exception(thrown);
      } catch (const Failed& failed) {
        failure_ = failed.error;
      } catch (const std::exception& e) {
        failure_ = internal_error(e.what());
      }
    });
  }

  asio::awaitable<std::unique_ptr<Client>> connect() {
    auto connection = redis::Connection::create(io_.get_executor(), connection_options_);
    connection->start();
    connections_.push_back(connection);
    auto client = std::make_unique<Client>(connection, options_.queue);
    must(co_await client->load_library(soon()));
    co_return client;
  }

  asio::awaitable<void> sleep_until(Clock::time_point at) {
    asio::steady_timer timer(io_, at);
    co_await timer.async_wait(asio::use_awaitable);
  }

  asio::awaitable<void> all() {
    scheduler_ = co_await connect();
    epoch_ = must(co_await scheduler_->lead("bench", 3'600'000, soon()));
    feed_ = std::make_unique<queue::Feed>(connections_.front(), options_.queue.shard, false);
    for (int w = 0; w < options_.workers; ++w) {
      auto client = co_await connect();
      workers_.push_back(std::make_unique<Worker>(io_, std::move(client), "w" + std::to_string(w),
                                                  std::max(1, options_.running / options_.workers)));
    }
    spawn(follow());
    spawn(schedule());
    spawn(reap());
    for (auto& worker : workers_) spawn(work(*worker));
    producer_ = co_await connect();
    began_ = Clock::now();
    producing_ = options_.producers;
    for (int p = 0; p < options_.producers; ++p) spawn(produce());
    boost::system::error_code ignored;
    co_await all_finished_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    result_.seconds = std::chrono::duration<double>(Clock::now() - began_).count();
    co_await check();
    ended_ = true;
    for (auto& connection : connections_) connection->stop();
  }

  void notice_end() {
    if (producing_ == 0 && result_.finished == submitted_) all_finished_.cancel();
  }

  bool may_submit() const {
    if (options_.jobs > 0 && submitted_ >= options_.jobs) return false;
    return options_.seconds <= 0 || std::chrono::duration<double>(Clock::now() - began_).count() < options_.seconds;
  }

  asio::awaitable<void> produce() {
    for (;;) {
      co_await window_.acquire();
      if (!may_submit()) break;
      const auto number = submitted_++;
      if (options_.rate > 0) {
        const auto after_s = static_cast<double>(number) / options_.rate;
        co_await sleep_until(began_ + std::chrono::microseconds(static_cast<std::int64_t>(after_s * 1e6)));
      }
      queue::Submission submission;
      submission.id = new_id();
      submission.spec = kSpec;
      submission.traceparent = kTrace;
      submission.idempotency_key = submission.id;
      if (options_.rate > 0) submitted_at_[submission.id] = Clock::now();
      must(co_await producer_->submit(submission, soon()));
    }
    window_.release();  // wakes the next producer, which ends too
    --producing_;
    notice_end();
  }

  // As LeaderTerm does: an admission and the assignments that follow it go out in one pipeline.
  asio::awaitable<void> schedule() {
    std::size_t next_worker = 0;
    while (!ended_) {
      const auto entries = must(co_await scheduler_->read_intake(256, std::chrono::milliseconds(500)));
      if (entries.empty()) continue;
      std::vector<queue::Admission> admissions;
      std::vector<std::vector<queue::AssignRequest>> units(workers_.size());
      for (const auto& entry : entries) {
        queue::Admission& admission = admissions.emplace_back();
        admission.entry_id = entry.entry_id;
        admission.id = entry.id;
        admission.spec = entry.spec;
        admission.class_key = "flux.1-dev/1024x1024x1/cfg/512/bf16";
        admission.steps = 28;
        admission.cost_us = 5'123'456;
        units[next_worker++ % units.size()].push_back({{entry.id, 0}, new_nonce(), "warm, free in 0 ms"});
      }
      // More than one call's worth of admissions must be admitted before the first assignment goes out.
      if (admissions.size() > 128) {
        co_await admit(std::move(admissions));
      } else {
        spawn(admit(std::move(admissions)));
      }
      for (std::size_t w = 0; w < units.size(); ++w) {
        if (!units[w].empty()) spawn(assign(workers_[w]->owner, std::move(units[w])));
      }
    }
  }

  asio::awaitable<void> admit(std::vector<queue::Admission> admissions) {
    must(co_await scheduler_->admit(epoch_, admissions, soon()));
  }

  asio::awaitable<void> assign(std::string owner, std::vector<queue::AssignRequest> units) {
    for (const bool done : must(co_await scheduler_->assign(epoch_, owner, units, soon()))) {
      if (!done) throw Failed(internal_error("a job that was just admitted could not be assigned"));
    }
  }

  asio::awaitable<void> reap() {
    while (!ended_) {
      co_await sleep_until(Clock::now() + std::chrono::milliseconds(200));
      const int touched = must(co_await scheduler_->reap(epoch_, 100, soon()));
      if (touched > 0)
        throw Failed(internal_error(std::to_string(touched) + " leases lapsed although their workers renew them"));
    }
  }

  asio::awaitable<void> follow() {
    while (!ended_) {
      auto batch = must(co_await feed_->next(std::chrono::milliseconds(500)));
      result_.feed_events += static_cast<std::int64_t>(batch.events.size());
    }
  }

  asio::awaitable<void> work(Worker& worker) {
    std::string cursor = "0";
    while (!ended_) {
      auto mail = must(co_await worker.client->read_mailbox(worker.owner, cursor, 100, std::chrono::milliseconds(500)));
      if (mail.empty()) continue;
      cursor = mail.back().entry_id;
      std::vector<std::string> entries;
      for (const auto& message : mail) {
        if (entries.empty() || entries.back() != message.entry_id) entries.push_back(message.entry_id);
      }
      must(co_await worker.client->acknowledge(worker.owner, entries, soon()));
      for (auto& message : mail) {
        co_await worker.free.acquire();
        spawn(run_unit(worker, {message.ref, message.nonce}));
      }
    }
  }

  asio::awaitable<void> run_unit(Worker& worker, queue::Attempt attempt) {
    must(co_await worker.client->start(attempt, soon()));
    if (options_.rate > 0) {
      const auto it = submitted_at_.find(attempt.ref.job);
      result_.submit_to_started_us.push_back(
          std::chrono::duration<double, std::micro>(Clock::now() - it->second).count());
      submitted_at_.erase(it);
    }
    for (int step : {9, 18, 27}) {
      const queue::Renewal renewal{attempt, step, 28};
      const auto outcome = must(co_await worker.client->renew(std::span(&renewal, 1), soon()));
      if (outcome.at(0) != queue::RenewOutcome::kOk) throw Failed(internal_error("a lease was lost"));
    }
    queue::Completion completion;
    completion.attempt = attempt;
    completion.manifest = kManifest;
    completion.phases_us = {{"text", 120'000}, {"denoise", 4'800'000}, {"vae", 150'000}, {"encode", 40'000}};
    must(co_await worker.client->complete(completion, soon()));
    worker.free.release();
    window_.release();
    ++result_.finished;
    if (std::find(options_.marks.begin(), options_.marks.end(), result_.finished) != options_.marks.end())
      options_.on_mark(result_.finished);
    last_jobs_.push_back(attempt.ref.job);
    if (last_jobs_.size() > kSample) last_jobs_.pop_front();
    notice_end();
  }

  asio::awaitable<void> check() {
    const queue::Keys keys(options_.queue.shard);
    auto& connection = *connections_.front();
    std::vector<std::pair<std::string, const char*>> empty = {
        {keys.in(), "XLEN"}, {keys.ready(), "ZCARD"}, {keys.lease(), "ZCARD"}, {keys.delayed(), "ZCARD"}};
    for (const auto& worker : workers_) empty.emplace_back(keys.mailbox(worker->owner), "XLEN");
    for (const auto& [key, command] : empty) {
      const auto left = must(co_await connection.execute(redis::Command(command) << key, soon())).integer;
      if (left != 0) throw Failed(internal_error(std::to_string(left) + " entries are left in " + key));
    }
    for (const std::string& id : last_jobs_) {
      const auto events = must(co_await scheduler_->events(id, "0", 100, soon()));
      std::string types;
      for (const auto& event : events) types += event.type + " ";
      if (types != kEvents)
        throw Failed(internal_error("job " + id + " has the events " + types + "; it should have " + kEvents));
      const auto record = must(co_await scheduler_->job(id, "", soon()));
      if (record.state != job::State::kSucceeded || record.unit_records.at(0).manifest != kManifest) {
        throw Failed(internal_error("job " + id + " did not succeed with its manifest"));
      }
    }
  }

  const LoadOptions& options_;
  asio::io_context io_{1};
  Semaphore window_;
  asio::steady_timer all_finished_;  // canceled when every submitted job has finished
  redis::ConnectionOptions connection_options_;
  std::vector<std::shared_ptr<redis::Connection>> connections_;
  std::unique_ptr<Client> scheduler_, producer_;
  std::unique_ptr<queue::Feed> feed_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::deque<std::string> last_jobs_;
  std::unordered_map<std::string, Clock::time_point> submitted_at_;
  std::int64_t epoch_ = 0, submitted_ = 0;
  int producing_ = 0;
  Clock::time_point began_;
  bool ended_ = false;
  std::optional<Error> failure_;
  LoadResult result_;
};

}  // namespace

Result<LoadResult> run_load(const LoadOptions& options) { return Load(options).run(); }

}  // namespace ditfleet::bench
