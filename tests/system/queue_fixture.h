// A queue client on a Redis of its own, with calls that block until they are done.
#pragma once

#include <gtest/gtest.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shared/core/ids.h"
#include "shared/queue/client.h"
#include "shared/queue/keys.h"
#include "shared/redis/connection.h"
#include "tests/system/redis_server.h"
#include "tests/system/run_to_end.h"
#include "tests/system/unit_places.h"

namespace ditfleet::testing {

namespace asio = boost::asio;

inline Deadline soon() { return Deadline::after(std::chrono::seconds(10)); }

class QueueTest : public ::testing::Test {
 protected:
  static constexpr char kSpec[] = R"({"model":"demo","prompt":"a red circle"})";

  explicit QueueTest(RedisServer::Options server = {}, queue::QueueOptions options = {})
      : server_(server), options_(options) {
    connection_ = connect();
    client_ = std::make_unique<queue::Client>(connection_, options_);
    EXPECT_TRUE(wait(client_->load_library(soon())).ok());
  }
  ~QueueTest() override {
    client_.reset();
    connection_->stop();
    io_.restart();
    io_.run_for(std::chrono::milliseconds(50));
  }

  void TearDown() override {
    if (!connection_->connected()) return;
    const auto misplaced = wait(connection_->execute(misplaced_units(keys_), soon()));
    if (!misplaced) return;
    for (const auto& unit : misplaced->elements) ADD_FAILURE() << unit.text;
  }

  std::shared_ptr<redis::Connection> connect(redis::ConnectionOptions options = {}) {
    options.endpoint = server_.endpoint();
    auto connection = redis::Connection::create(io_.get_executor(), options);
    connection->start();
    return connection;
  }

  // Runs the coroutine to its end; what it throws, this throws.
  template <class T>
  T wait(asio::awaitable<T> task) {
    return run_to_end(io_, std::move(task));
  }

  // A plain command; the reply must not be an error.
  redis::Reply redis(const std::vector<std::string>& words) {
    redis::Command command;
    for (const std::string& word : words) command << word;
    auto reply = wait(connection_->execute(command, soon()));
    EXPECT_TRUE(reply.ok()) << words[0] << ": " << (reply ? "" : reply.error().message);
    return reply ? *reply : redis::Reply();
  }

  queue::Submission submission(std::string id = {}) {
    queue::Submission s;
    s.id = id.empty() ? new_id() : std::move(id);
    s.spec = kSpec;
    return s;
  }
  std::string submit(const queue::Submission& s) {
    auto outcome = wait(client_->submit(s, soon()));
    EXPECT_TRUE(outcome.ok()) << (outcome ? "" : outcome.error().message);
    return outcome ? outcome->id : std::string();
  }
  std::string submit() { return submit(submission()); }

  void lead() {
    auto epoch = wait(client_->lead("coordinator-1", 60'000, soon()));
    ASSERT_TRUE(epoch.ok());
    epoch_ = *epoch;
    ASSERT_GT(epoch_, 0);
  }
  std::vector<queue::IntakeEntry> intake(int limit = 100) {
    auto entries = wait(client_->read_intake(limit, std::chrono::milliseconds(1)));
    EXPECT_TRUE(entries.ok());
    return entries ? *entries : std::vector<queue::IntakeEntry>();
  }
  static queue::Admission admission(const queue::IntakeEntry& entry, int units = 1) {
    queue::Admission a;
    a.entry_id = entry.entry_id;
    a.id = entry.id;
    a.units = units;
    a.spec = entry.spec;
    a.class_key = "demo/256x256x1/none/64/fp32";
    a.steps = 20;
    a.cost_us = 1'000'000;
    a.deadline_ms = entry.deadline_ms;
    a.raw = entry.raw;
    a.tenant = entry.tenant;
    a.idempotency_key = entry.idempotency_key;
    a.traceparent = entry.traceparent;
    return a;
  }
  // Reads the intake and admits all of it.
  void admit_all(int units = 1) {
    if (epoch_ == 0) lead();
    std::vector<queue::Admission> all;
    for (const auto& entry : intake()) all.push_back(admission(entry, units));
    auto done = wait(client_->admit(epoch_, all, soon()));
    ASSERT_TRUE(done.ok()) << done.error().message;
  }
  queue::Attempt assign(const std::string& job, int unit = 0, const std::string& owner = "w0:boot0") {
    queue::Attempt attempt{{job, unit}, new_nonce()};
    const queue::AssignRequest request{attempt.ref, attempt.nonce, "warm"};
    auto done = wait(client_->assign(epoch_, owner, std::span(&request, 1), soon()));
    EXPECT_TRUE(done.ok() && done->size() == 1 && done->front());
    return attempt;
  }
  Result<void> start(const queue::Attempt& attempt) { return wait(client_->start(attempt, soon())); }
  // Submitted, admitted, assigned and started.
  queue::Attempt running(int units = 1) {
    const std::string id = submit();
    admit_all(units);
    queue::Attempt attempt = assign(id);
    EXPECT_TRUE(start(attempt).ok());
    return attempt;
  }
  Result<void> complete(const queue::Attempt& attempt, const std::string& manifest = R"({"key":"k"})") {
    queue::Completion c;
    c.attempt = attempt;
    c.manifest = manifest;
    c.phases_us = {{"denoise", 12345}};
    return wait(client_->complete(c, soon()));
  }
  queue::RenewOutcome renew(const queue::Attempt& attempt, int step = 1, int total = 20) {
    const queue::Renewal renewal{attempt, step, total};
    auto out = wait(client_->renew(std::span(&renewal, 1), soon()));
    EXPECT_TRUE(out.ok() && out->size() == 1);
    return out ? out->front() : queue::RenewOutcome::kLost;
  }
  queue::JobRecord job(const std::string& id) {
    auto record = wait(client_->job(id, "", soon()));
    EXPECT_TRUE(record.ok()) << (record ? "" : record.error().message);
    return record ? *record : queue::JobRecord();
  }
  // "queued ready:0 assigned:0 …"
  std::string event_types(const std::string& id) {
    auto events = wait(client_->events(id, "0", 10'000, soon()));
    std::string out;
    for (const auto& e : *events)
      out += (out.empty() ? "" : " ") + e.type + (e.unit < 0 ? "" : ":" + std::to_string(e.unit));
    return out;
  }
  int reap() {
    auto n = wait(client_->reap(epoch_, 100, soon()));
    EXPECT_TRUE(n.ok()) << (n ? "" : n.error().message);
    return n ? *n : -1;
  }

  asio::io_context io_;
  RedisServer server_;
  queue::QueueOptions options_;
  queue::Keys keys_{0};
  std::shared_ptr<redis::Connection> connection_;
  std::unique_ptr<queue::Client> client_;
  std::int64_t epoch_ = 0;
};

}  // namespace ditfleet::testing
