#include "coordinator/cli/bench_queue_load.h"

#include <sys/resource.h>

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <exception>
#include <optional>
#include <unordered_map>

#include "shared/core/ids.h"
#include "shared/queue/keys.h"
#include "shared/redis/connection.h"

namespace ditfleet::cli {
namespace {

namespace asio = boost::asio;
using Clock = std::chrono::steady_clock;
using queue::Client;

// What a gateway would store: the size matters, Redis keeps it opaque.
constexpr char kSpec[] =
    R"({"model":"flux.1-dev","prompt":"a lighthouse on a cliff above a stormy sea at dusk, oil on canvas, thick brush strokes, warm light in the windows","n":1,"width":1024,"height":1024,"num_inference_steps":28,"guidance_scale":3.5,"max_sequence_length":512,"seed":1234567890123,"loras":[{"name":"impasto","scale":0.8}],"output_format":"png"})";
constexpr char kTrace[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
constexpr char kManifest[] =
    R"({"backend":"file","key":"a0/lighthouse.png","media_type":"image/png","bytes":1482311,"sha256":"9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08","width":1024,"height":1024,"seed":1234567890123})";
constexpr char kEvents[] = "queued ready assigned started step step step succeeded succeeded ";

double thread_cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_THREAD, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Thrown inside the load's coroutines, caught in run_load: one failure ends the run.
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

class Load {
 public:
  explicit Load(const LoadOptions& options) : options_(options), changed_(io_) {
    changed_.expires_at(Clock::time_point::max());
  }

  Result<LoadResult> run() {
    auto endpoint = redis::Endpoint::parse(options_.redis_url);
    if (!endpoint) return endpoint.error();
    connection_options_.endpoint = *endpoint;
    spawn(all());
    const double cpu = thread_cpu_seconds();
    while (!ended_ && !failure_ && io_.run_one() > 0) {
      if (options_.stop != nullptr && *options_.stop) return Error{Code::kCanceled, "stopped"};
    }
    result_.client_cpu_seconds = thread_cpu_seconds() - cpu;
    if (failure_) return *failure_;
    return std::move(result_);
  }

 private:
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

  std::unique_ptr<Client> client() {
    auto connection = redis::Connection::create(io_.get_executor(), connection_options_);
    connection->start();
    connections_.push_back(connection);
    return std::make_unique<Client>(connection, options_.queue);
  }

  asio::awaitable<void> sleep_until(Clock::time_point at) {
    asio::steady_timer timer(io_, at);
    co_await timer.async_wait(asio::use_awaitable);
  }
  asio::awaitable<void> something_finished() {
    boost::system::error_code ignored;
    co_await changed_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  }

  asio::awaitable<void> all() {
    auto scheduler = client();
    scheduler_ = scheduler.get();
    must(co_await scheduler->load_library(soon()));
    epoch_ = must(co_await scheduler->lead("bench", 3'600'000, soon()));
    feed_ = std::make_unique<queue::Feed>(connections_.front(), options_.queue.shard, false);
    spawn(follow());
    spawn(schedule(*scheduler));
    spawn(reap(*scheduler));
    std::vector<std::unique_ptr<Client>> clients;
    for (int w = 0; w < options_.workers; ++w) {
      clients.push_back(client());
      owners_.push_back("w" + std::to_string(w) + ":" + new_nonce().substr(0, 16));
      must(co_await clients.back()->load_library(soon()));
      spawn(work(*clients.back(), owners_.back()));
    }
    began_ = Clock::now();
    for (int p = 0; p < options_.producers; ++p) {
      clients.push_back(client());
      must(co_await clients.back()->load_library(soon()));
      ++producing_;
      spawn(produce(*clients.back()));
    }
    while (producing_ > 0 || result_.finished < submitted_) co_await something_finished();
    result_.seconds = std::chrono::duration<double>(Clock::now() - began_).count();
    co_await check(*scheduler);
    ended_ = true;
    for (auto& connection : connections_) connection->stop();
    // Their coroutines still wait in them: what they need must stay until the process forgets the load.
    for (auto& c : clients) kept_.push_back(std::move(c));
    kept_.push_back(std::move(scheduler));
  }

  bool may_submit() const {
    if (options_.jobs > 0 && submitted_ >= options_.jobs) return false;
    return options_.seconds <= 0 || std::chrono::duration<double>(Clock::now() - began_).count() < options_.seconds;
  }

  asio::awaitable<void> produce(Client& client) {
    std::vector<queue::Submission> batch;
    while (may_submit()) {
      if (submitted_ - result_.finished >= options_.window) {
        co_await something_finished();
        continue;
      }
      std::int64_t count = options_.batch;
      if (options_.jobs > 0) count = std::min(count, options_.jobs - submitted_);
      if (options_.rate > 0) {
        co_await sleep_until(began_ + std::chrono::microseconds(static_cast<std::int64_t>(
                                          static_cast<double>(submitted_) * 1e6 / options_.rate)));
        if (options_.jobs > 0) count = std::min(count, options_.jobs - submitted_);
        if (count <= 0) break;
      }
      submitted_ += count;
      batch.resize(static_cast<std::size_t>(count));
      for (queue::Submission& s : batch) {
        s.id = new_id();
        s.spec = kSpec;
        s.traceparent = kTrace;
        s.idempotency_key = s.id;
        if (options_.rate > 0) submitted_at_[s.id] = Clock::now();
      }
      for (auto& outcome : must(co_await client.submit_many(batch, soon()))) must(std::move(outcome));
    }
    --producing_;
    changed_.cancel();
  }

  asio::awaitable<void> schedule(Client& client) {
    std::size_t next_worker = 0;
    while (!ended_) {
      const auto entries = must(co_await client.read_intake(256, std::chrono::milliseconds(500)));
      for (std::size_t begin = 0; begin < entries.size(); begin += static_cast<std::size_t>(options_.batch)) {
        const std::size_t end = std::min(entries.size(), begin + static_cast<std::size_t>(options_.batch));
        // As the scheduler does when a worker has room: admitted and assigned in one call.
        const auto& owner = owners_[next_worker++ % owners_.size()];
        std::vector<queue::Dispatch> jobs;
        for (std::size_t i = begin; i < end; ++i) {
          queue::Dispatch job;
          job.admission.entry_id = entries[i].entry_id;
          job.admission.id = entries[i].id;
          job.admission.spec = entries[i].spec;
          job.admission.class_key = "flux.1-dev/1024x1024x1/cfg/512/bf16";
          job.admission.steps = 28;
          job.admission.cost_us = 5'123'456;
          job.placements.push_back({owner, {{entries[i].id, 0}, new_nonce(), "warm, free in 0 ms"}});
          jobs.push_back(std::move(job));
        }
        for (const bool done : must(co_await client.dispatch(epoch_, jobs, soon()))) {
          if (!done) throw Failed(internal_error("a job that was just submitted could not be dispatched"));
        }
      }
    }
  }

  asio::awaitable<void> reap(Client& client) {
    while (!ended_) {
      co_await sleep_until(Clock::now() + std::chrono::milliseconds(200));
      const int touched = must(co_await client.reap(epoch_, 100, soon()));
      if (touched > 0)
        throw Failed(internal_error(std::to_string(touched) + " leases lapsed under workers that renew"));
    }
  }

  asio::awaitable<void> follow() {
    while (!ended_) {
      auto batch = must(co_await feed_->next(std::chrono::milliseconds(500)));
      result_.feed_events += static_cast<std::int64_t>(batch.events.size());
    }
  }

  asio::awaitable<void> work(Client& client, std::string owner) {
    std::string cursor = "0";
    int waves = 0;
    while (!ended_) {
      auto mail = must(co_await client.read_mailbox(owner, cursor, 1, std::chrono::milliseconds(500)));
      if (mail.empty()) continue;
      cursor = mail.back().entry_id;
      // A few waves at once: the next is read and started while the one before is renewed.
      while (waves >= 4) co_await something_finished();
      ++waves;
      spawn(wave(client, owner, std::move(mail), waves));
    }
  }

  asio::awaitable<void> wave(Client& client, const std::string& owner, std::vector<queue::MailboxEntry> mail,
                             int& waves) {
    std::vector<queue::Attempt> attempts;
    std::vector<std::string> entries;
    for (const auto& entry : mail) {
      attempts.push_back({entry.ref, entry.nonce});
      if (entries.empty() || entries.back() != entry.entry_id) entries.push_back(entry.entry_id);
    }
    for (auto& started : must(co_await client.start_many(attempts, soon()))) must(std::move(started));
    if (options_.rate > 0) {
      const auto now = Clock::now();
      for (const auto& attempt : attempts) {
        const auto it = submitted_at_.find(attempt.ref.job);
        result_.submit_to_started_us.push_back(std::chrono::duration<double, std::micro>(now - it->second).count());
        submitted_at_.erase(it);
      }
    }
    for (int step : {9, 18, 27}) {
      std::vector<queue::Renewal> renewals;
      for (const auto& attempt : attempts) renewals.push_back({attempt, step, 28});
      for (const auto outcome : must(co_await client.renew(renewals, soon()))) {
        if (outcome != queue::RenewOutcome::kOk) throw Failed(internal_error("a lease was lost"));
      }
    }
    std::vector<queue::Completion> completions;
    for (const auto& attempt : attempts) {
      queue::Completion c;
      c.attempt = attempt;
      c.manifest = kManifest;
      c.phases_us = {{"text", 120'000}, {"denoise", 4'800'000}, {"vae", 150'000}, {"encode", 40'000}};
      completions.push_back(std::move(c));
    }
    for (auto& done : must(co_await client.complete_many(completions, soon()))) must(std::move(done));
    must(co_await client.acknowledge(owner, entries, soon()));
    for (std::size_t i = 0; i < attempts.size(); ++i) {
      ++result_.finished;
      if (options_.on_mark &&
          std::find(options_.marks.begin(), options_.marks.end(), result_.finished) != options_.marks.end()) {
        options_.on_mark(result_.finished);
      }
    }
    last_ids_.push_back(attempts.back().ref.job);
    if (last_ids_.size() > 50) last_ids_.erase(last_ids_.begin());
    --waves;
    changed_.cancel();
  }

  asio::awaitable<void> check(Client& client) {
    const queue::Keys keys(options_.queue.shard);
    auto& connection = *connections_.front();
    const std::pair<std::string, const char*> empty[] = {
        {keys.in(), "XLEN"}, {keys.ready(), "ZCARD"}, {keys.lease(), "ZCARD"}, {keys.delayed(), "ZCARD"}};
    for (const auto& [key, command] : empty) {
      const auto left = must(co_await connection.execute(redis::Command(command) << key, soon())).integer;
      if (left != 0) throw Failed(internal_error(std::to_string(left) + " entries are left in " + key));
    }
    for (const std::string& owner : owners_) {
      const auto left =
          must(co_await connection.execute(redis::Command("XLEN") << keys.mailbox(owner), soon())).integer;
      if (left != 0) throw Failed(internal_error(std::to_string(left) + " entries are left in a mailbox"));
    }
    for (const std::string& id : last_ids_) {
      const auto events = must(co_await client.events(id, "0", 100, soon()));
      std::string types;
      for (const auto& event : events) types += event.type + " ";
      if (types != kEvents)
        throw Failed(internal_error("job " + id + " has the events " + types + "; it should have " + kEvents));
      const auto record = must(co_await client.job(id, "", soon()));
      if (record.state != job::State::kSucceeded || record.unit_records.at(0).manifest != kManifest) {
        throw Failed(internal_error("job " + id + " did not succeed with its manifest"));
      }
    }
  }

  const LoadOptions& options_;
  asio::io_context io_{1};
  asio::steady_timer changed_;
  redis::ConnectionOptions connection_options_;
  std::vector<std::shared_ptr<redis::Connection>> connections_;
  std::vector<std::unique_ptr<Client>> kept_;
  Client* scheduler_ = nullptr;
  std::unique_ptr<queue::Feed> feed_;
  std::vector<std::string> owners_, last_ids_;
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

}  // namespace ditfleet::cli
