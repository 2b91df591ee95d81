#include "tests/bench/takeover.h"

#include <algorithm>
#include <chrono>
#include <memory>

#include "coordinator/scheduling/service/scheduler_service.h"
#include "tests/fixtures/image_model.h"
#include "tests/system/null_worker.h"
#include "tests/system/run_to_end.h"

namespace ditfleet::bench {
namespace {

constexpr int kJobs = 4000, kUnits = 25, kBatch = 100;

Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }

asio::awaitable<Result<void>> fill(queue::Client& client) {
  if (auto loaded = co_await client.load_library(soon()); !loaded) co_return loaded;
  const auto epoch = co_await client.lead("first", 3'600'000, soon());
  if (!epoch) co_return epoch.error();
  const std::string spec = R"({"model":"tiny","prompt":")" + std::string(16 << 10, 'x') + R"(","seed":1})";
  for (int job = 0; job < kJobs; job += kBatch) {
    for (int i = 0; i < kBatch; ++i) {
      queue::Submission submission;
      submission.spec = spec;
      if (auto done = co_await client.submit(submission, soon()); !done) co_return done.error();
    }
    const auto entries = co_await client.read_intake(kBatch, std::chrono::seconds(1));
    if (!entries) co_return entries.error();
    std::vector<queue::Admission> admissions;
    for (const auto& entry : *entries) {
      queue::Admission& a = admissions.emplace_back();
      a.entry_id = entry.entry_id;
      a.id = entry.id;
      a.units = kUnits;
      a.spec = entry.spec;
      a.class_key = "tiny/256x256x1/none/512/auto";
      a.steps = 4;
      a.cost_us = 1'000'000;
    }
    if (auto done = co_await client.admit(*epoch, admissions, soon()); !done) co_return done;
  }
  co_return co_await client.resign("first", *epoch, soon());
}

asio::awaitable<Result<void>> first_start(testing::NullWorker& worker, Deadline deadline) {
  asio::steady_timer timer(co_await asio::this_coro::executor);
  while (worker.started.empty()) {
    if (deadline.passed()) co_return Error{Code::kDeadlineExceeded, "the new leader assigned nothing"};
    timer.expires_after(std::chrono::milliseconds(2));
    co_await timer.async_wait(asio::use_awaitable);
  }
  co_return Result<void>();
}

asio::awaitable<Result<void>> log_slow_calls(redis::Connection& connection) {
  std::vector<redis::Command> commands;
  commands.push_back(redis::Command("CONFIG") << "SET"
                                              << "slowlog-log-slower-than" << 500 << "slowlog-max-len" << 100'000);
  commands.push_back(redis::Command("SLOWLOG") << "RESET");
  const auto replies = co_await connection.execute_all(std::move(commands), soon());
  for (const auto& reply : replies) {
    if (!reply) co_return reply.error();
  }
  co_return Result<void>();
}

asio::awaitable<Result<double>> longest_call_ms(redis::Connection& connection) {
  const auto slow = co_await connection.execute(redis::Command("SLOWLOG") << "GET" << -1, soon());
  if (!slow) co_return slow.error();
  std::int64_t longest_us = 0;
  for (const auto& call : slow->elements) longest_us = std::max(longest_us, call.elements.at(2).integer);
  co_return static_cast<double>(longest_us) / 1e3;
}

}  // namespace

Result<Takeover> take_over(const std::string& redis_url) {
  auto endpoint = redis::Endpoint::parse(redis_url);
  if (!endpoint) return endpoint.error();
  asio::io_context io;
  redis::ConnectionOptions connection_options;
  connection_options.endpoint = *endpoint;
  const auto connection = redis::Connection::create(io.get_executor(), connection_options);
  connection->start();
  const auto client = std::make_shared<queue::Client>(connection, queue::QueueOptions{});
  if (auto filled = testing::run_to_end(io, fill(*client)); !filled) return filled.error();

  if (auto logged = testing::run_to_end(io, log_slow_calls(*connection)); !logged) return logged.error();

  scheduling::SchedulerServiceOptions options;
  options.coordinator = "second";
  options.scheduler.catalogue.models["tiny"] = job::image_model("tiny", 256, 4);
  options.scheduler.catalogue.default_model = "tiny";
  options.scheduler.new_nonce = new_nonce;
  const auto began = std::chrono::steady_clock::now();
  auto service = std::make_unique<scheduling::SchedulerService>(io.get_executor(), connection, client, options);
  service->start();
  auto worker = std::make_unique<testing::NullWorker>(io, *endpoint, testing::NullWorker::Options{});
  const auto started = testing::run_to_end(io, first_start(*worker, Deadline::after(std::chrono::minutes(2))));
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  const auto longest = testing::run_to_end(io, longest_call_ms(*connection));
  worker->vanish();
  service.reset();
  connection->stop();
  io.restart();
  io.run_for(std::chrono::milliseconds(50));  // ends their coroutines
  if (!started) return started.error();
  if (!longest) return longest.error();
  return Takeover{.first_start_s = took.count(), .longest_call_ms = *longest};
}

}  // namespace ditfleet::bench
