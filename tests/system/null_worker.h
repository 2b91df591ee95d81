// A worker without a model: takes units from its mailbox, starts them, renews their leases, "denoises" for as
// long as it is told, completes. One at a time, as a GPU does.
#pragma once

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shared/core/ids.h"
#include "shared/core/task_group.h"
#include "shared/queue/client.h"
#include "shared/redis/connection.h"

namespace ditfleet::testing {

namespace asio = boost::asio;
using namespace std::chrono_literals;

// Its coroutines keep what they use alive: a worker that is destroyed may still have calls under way, which end
// when the test's io_context runs on.
class NullWorker {
 public:
  struct Options {
    std::string name = "null";
    std::vector<std::string> models = {"tiny"};
    std::chrono::milliseconds run{0}, lease{5000};
    bool starts = true;  // false: takes what it is assigned and never starts it
    bool fails = false;  // fails what it starts, at once and so that it may be retried
    std::string poison;  // the job that kills it before it starts; empty: none
    std::map<std::string, queue::ModelMemory> memory = {};
    std::function<std::chrono::milliseconds(const queue::UnitRef&)> run_of = {};  // in place of `run`
    std::function<bool(const queue::UnitRef&)> fails_on = {};                     // as `fails`, for some
    std::chrono::milliseconds backoff{500};                                       // of what fails
  };

  NullWorker(asio::io_context& io, const redis::Endpoint& endpoint, Options options)
      : state_(std::make_shared<State>(io, endpoint, std::move(options))),
        started(state_->started),
        completed(state_->completed) {
    state_->spawn("heartbeat", &State::heartbeat);
    state_->spawn("mailbox", &State::mailbox);
    state_->spawn("run", &State::run);
    state_->spawn("renew", &State::renew);
  }
  ~NullWorker() { vanish(); }
  NullWorker(const NullWorker&) = delete;

  // As a SIGKILL: says nothing, renews nothing.
  void vanish() {
    state_->tasks_.stop();
    state_->connection_->stop();
  }
  void drain() { state_->info_.state = "draining"; }
  std::string owner() const { return state_->info_.owner(); }
  bool dead() const { return state_->dead_; }

 private:
  struct State : std::enable_shared_from_this<State> {
    State(asio::io_context& io, const redis::Endpoint& endpoint, Options options)
        : options_(std::move(options)), tasks_(io.get_executor()), io_(io) {
      redis::ConnectionOptions connection;
      connection.endpoint = endpoint;
      connection_ = redis::Connection::create(io.get_executor(), connection);
      connection_->start();
      queue::QueueOptions queue_options;
      queue_options.lease_ms = options_.lease.count();
      queue_options.retry_backoff_ms = options_.backoff.count();
      client_ = std::make_unique<queue::Client>(connection_, queue_options);
      info_.name = options_.name;
      info_.boot = new_nonce();
      info_.state = "ready";
      info_.models = options_.models;
      info_.memory = options_.memory;
    }
    void spawn(const char* name, asio::awaitable<void> (State::*body)()) {
      tasks_.spawn(name, [](std::shared_ptr<State> self, auto member) -> asio::awaitable<void> {
        co_await ((*self).*member)();
      }(shared_from_this(), body));
    }
    asio::awaitable<void> pause(std::chrono::milliseconds time) {
      asio::steady_timer timer(io_, time);
      co_await timer.async_wait(asio::use_awaitable);
    }
    asio::awaitable<void> heartbeat() {
      for (;;) {
        (void)co_await client_->heartbeat(info_, Deadline::after(1s));
        co_await pause(100ms);
      }
    }
    asio::awaitable<void> mailbox() {
      std::string after = "0";
      for (;;) {
        auto entries = co_await client_->read_mailbox(info_.owner(), after, 100, 500ms);
        if (!entries) {
          co_await pause(50ms);
          continue;
        }
        for (const auto& entry : *entries) {
          after = entry.entry_id;
          if (entry.kind == queue::MailboxEntry::Kind::kAssign) {
            if (entry.ref.job == options_.poison) {
              dead_ = true;
              tasks_.stop();
              connection_->stop();
              co_return;
            }
            held_.push_back({entry.ref, entry.nonce});
          } else {
            std::erase_if(held_, [&](const queue::Attempt& a) { return a.nonce == entry.nonce; });
          }
        }
        if (arrived_ != nullptr) arrived_->cancel();
      }
    }
    asio::awaitable<void> renew() {
      for (;;) {
        std::vector<queue::Renewal> renewals;
        for (const auto& attempt : held_) renewals.push_back({.attempt = attempt});
        if (running_) renewals.push_back({.attempt = *running_});
        if (!renewals.empty()) (void)co_await client_->renew(renewals, Deadline::after(1s));
        co_await pause(300ms);
      }
    }
    asio::awaitable<void> run() {
      for (;;) {
        if (held_.empty() || !options_.starts) {
          asio::steady_timer timer(io_, 50ms);
          arrived_ = &timer;
          boost::system::error_code ignored;
          co_await timer.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
          arrived_ = nullptr;
          continue;
        }
        running_ = held_.front();
        held_.pop_front();
        const auto attempt = *running_;
        Result<void> done = co_await client_->start(attempt, Deadline::after(2s));
        while (!done && done.error().code != Code::kConflict) {
          co_await pause(20ms);
          done = co_await client_->start(attempt, Deadline::after(2s));
        }
        if (done) {
          started.push_back(attempt.ref);
          if (options_.fails || (options_.fails_on && options_.fails_on(attempt.ref))) {
            queue::Failure failure{.attempt = attempt, .error = {Code::kOutOfMemory, "[test] no memory"}};
            failure.retryable = true;
            (void)co_await client_->fail(failure, Deadline::after(2s));
            running_.reset();
            continue;
          }
          if (const auto run = options_.run_of ? options_.run_of(attempt.ref) : options_.run; run > 0ms)
            co_await pause(run);
          queue::Completion completion{.attempt = attempt, .manifest = "{\"nonce\":\"" + attempt.nonce + "\"}"};
          done = co_await client_->complete(completion, Deadline::after(2s));
          while (!done && done.error().code != Code::kConflict) {
            co_await pause(20ms);
            done = co_await client_->complete(completion, Deadline::after(2s));
          }
          if (done) completed.push_back(attempt.ref);
        }
        running_.reset();
      }
    }

    std::vector<queue::UnitRef> started, completed;
    Options options_;
    TaskGroup tasks_;
    asio::io_context& io_;
    std::shared_ptr<redis::Connection> connection_;
    std::unique_ptr<queue::Client> client_;
    queue::WorkerInfo info_;
    std::deque<queue::Attempt> held_;
    std::optional<queue::Attempt> running_;
    bool dead_ = false;
    asio::steady_timer* arrived_ = nullptr;
  };

  std::shared_ptr<State> state_;

 public:
  const std::vector<queue::UnitRef>&started, &completed;  // what it has been told of; Redis may be a moment ahead
};

}  // namespace ditfleet::testing
