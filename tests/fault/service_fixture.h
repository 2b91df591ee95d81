// Runs DiTFleet as real processes (`ditfleet up` with a tiny random model) and a queue client.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "shared/core/bytes.h"
#include "shared/core/ids.h"
#include "shared/core/json.h"
#include "shared/queue/client.h"
#include "shared/redis/connection.h"
#include "shared/results/store.h"
#include "tests/fault/job_history.h"
#include "tests/paths.h"
#include "tests/system/run_to_end.h"
#include "tests/system/unit_places.h"

namespace ditfleet::testing {

namespace asio = boost::asio;
using namespace std::chrono_literals;

inline Deadline soon() { return Deadline::after(10s); }

class ServiceTest : public ::testing::Test {
 protected:
  // Starts the service and waits until its workers are ready. TearDown() stops every process and removes all files.
  void start(int workers, const std::vector<std::string>& sets = {},
             const std::string& model = "tiny=" + source_path("tests/fixtures/flux/dev/model")) {
    char folder[] = "/tmp/ditfleet-fault-XXXXXX";
    ASSERT_NE(::mkdtemp(folder), nullptr);
    dir_ = folder;
    const std::string ready_path = dir_ + "/ready.json";
    std::vector<std::string> words = {program_path("ditfleet"),
                                      "up",
                                      "--listen",
                                      "127.0.0.1:0",
                                      "--data",
                                      dir_ + "/data",
                                      "--workers",
                                      std::to_string(workers),
                                      "--model",
                                      model,
                                      "--device",
                                      "cpu",
                                      "--dtype",
                                      "fp32",
                                      "--ready-file",
                                      ready_path,
                                      "--set",
                                      "redis.appendfsync=always",
                                      "--set",
                                      "worker.threads=1"};
    // Compiled once, not by each service; `cache.dir=` gives a service its own folder (tests/programs.h).
    if (const char* programs = std::getenv("DITFLEET_TEST_PROGRAMS"))
      words.insert(words.end(), {"--set", std::string("cache.dir=") + programs});
    for (const auto& set : sets) words.insert(words.end(), {"--set", set});
    std::vector<char*> argv;
    for (auto& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    const int log = ::open((dir_ + "/up.log").c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
    up_ = ::fork();
    if (up_ == 0) {
      ::setpgid(0, 0);
      ::dup2(log, 1);
      ::dup2(log, 2);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
    ::close(log);
    const auto deadline = Deadline::after(180s);
    while (!std::filesystem::exists(ready_path)) {
      ASSERT_FALSE(deadline.passed()) << tail_of_log();
      ASSERT_EQ(::waitpid(up_, nullptr, WNOHANG), 0) << tail_of_log();
      ::usleep(20'000);
    }
    const auto ready = ready_file();
    ASSERT_TRUE(ready.contains("redis"));
    gateway_ = std::string(ready.at("gateway").as_string());
    redis::ConnectionOptions options;
    auto endpoint = redis::Endpoint::parse(std::string_view(ready.at("redis").as_string()));
    ASSERT_TRUE(endpoint.ok());
    options.endpoint = *endpoint;
    connection_ = redis::Connection::create(io_.get_executor(), options);
    connection_->start();
    client_ = std::make_unique<queue::Client>(connection_, queue::QueueOptions{});
    // The scheduler assigns units only after the workers have registered.
    ASSERT_TRUE(until(
        [&] {
          auto all = wait(client_->workers(soon()));
          return all &&
                 std::count_if(all->begin(), all->end(), [](const auto& w) { return w.state == "ready"; }) >= workers;
        },
        60s))
        << tail_of_log();
  }

  void TearDown() override {
    if (connection_ && connection_->connected()) {
      const auto misplaced = wait(connection_->execute(misplaced_units(queue::Keys(0)), soon()));
      if (misplaced) {
        for (const auto& unit : misplaced->elements) ADD_FAILURE() << unit.text;
      }
    }
    client_.reset();
    if (connection_) connection_->stop();
    io_.restart();
    io_.run_for(20ms);
    if (up_ > 0) {
      ::kill(up_, SIGTERM);
      const auto deadline = Deadline::after(40s);
      while (::waitpid(up_, nullptr, WNOHANG) == 0) {
        if (deadline.passed()) {
          ADD_FAILURE() << "ditfleet up did not end on SIGTERM\n" << tail_of_log();
          ::kill(-up_, SIGKILL);
          ::waitpid(up_, nullptr, 0);
          break;
        }
        ::usleep(20'000);
      }
    }
    if (HasFailure()) std::cerr << tail_of_log();
    if (HasFailure() && std::getenv("DITFLEET_KEEP") != nullptr) return;  // keeps the logs
    std::error_code ignored;
    if (!dir_.empty()) std::filesystem::remove_all(dir_, ignored);
  }

  // Current pid of a process, or -1 while it is being restarted. `ditfleet up` keeps the ready file up to date.
  pid_t pid_of(const char* part) const {
    const auto ready = ready_file();
    const auto* pids = ready.if_contains("pids");
    const auto* pid = pids ? pids->as_object().if_contains(part) : nullptr;
    return pid && pid->is_number() ? static_cast<pid_t>(pid->to_number<int>()) : -1;
  }
  std::vector<pid_t> pids_of_workers() const {
    std::vector<pid_t> pids;
    const auto ready = ready_file();
    for (const auto& pid : ready.at("pids").at("workers").as_array())
      pids.push_back(static_cast<pid_t>(pid.to_number<int>()));
    return pids;
  }
  // Pid of the registered worker with this name, or -1.
  pid_t pid_of_worker(const std::string& name) {
    auto all = wait(client_->workers(soon()));
    if (!all) return -1;
    for (const auto& worker : *all) {
      if (worker.name == name) return worker.pid;
    }
    return -1;
  }

  template <class T>
  T wait(asio::awaitable<T> task) {
    return run_to_end(io_, std::move(task));
  }
  template <class F>
  bool until(F condition, std::chrono::milliseconds limit) {
    const auto deadline = Deadline::after(limit);
    while (!condition()) {
      if (deadline.passed()) return false;
      nap(10ms);
    }
    return true;
  }
  void nap(std::chrono::milliseconds time) { wait(pause(time)); }

  // Retries until the job is acknowledged. A retry submits the same job, because the caller chooses its id.
  std::string submit(int steps, int n = 1, int side = 64) {
    queue::Submission s;
    s.id = new_id();
    s.spec = R"({"model":"tiny","prompt":"a red circle","seed":7,"width":)" + std::to_string(side) + R"(,"height":)" +
             std::to_string(side) + R"(,"n":)" + std::to_string(n) + R"(,"num_inference_steps":)" +
             std::to_string(steps) + "}";
    const auto deadline = Deadline::after(60s);
    for (;;) {
      auto outcome = wait(client_->submit(s, Deadline::after(2s)));
      if (outcome) return outcome->id;
      EXPECT_FALSE(deadline.passed()) << outcome.error().message;
      if (deadline.passed()) return {};
      nap(50ms);
    }
  }
  redis::Reply redis(const std::vector<std::string>& words) {
    redis::Command command;
    for (const auto& word : words) command << word;
    auto reply = wait(connection_->execute(std::move(command), soon()));
    EXPECT_TRUE(reply.ok()) << words[0] << ": " << (reply ? "" : reply.error().message);
    return reply ? *reply : redis::Reply();
  }
  std::vector<queue::Event> events(const std::string& id) {
    auto all = wait(client_->events(id, "0", 100'000, soon()));
    return all ? *all : std::vector<queue::Event>();
  }
  std::vector<queue::Event> events(const std::string& id, const std::string& type) {
    auto all = events(id);
    std::erase_if(all, [&](const queue::Event& e) { return e.type != type; });
    return all;
  }
  std::optional<queue::JobRecord> job(const std::string& id) {
    auto record = wait(client_->job(id, "", soon()));
    return record ? std::optional(*record) : std::nullopt;
  }
  bool ended(const std::string& id) {
    const auto record = job(id);
    return record && job::is_terminal(record->state);
  }
  std::string history(const std::string& id) {
    std::string out;
    for (const auto& e : events(id)) {
      if (e.type == "step") continue;
      out += " " + e.type;
      if (const auto it = e.fields.find("worker"); it != e.fields.end()) out += "@" + it->second;
      if (const auto it = e.fields.find("reason"); it != e.fields.end() && e.type == "ready")
        out += "(" + it->second + ")";
    }
    return out;
  }
  // Expects every job to end in `state` within the limit, exactly once and with a valid history (job_history.h).
  void expect_all_ended_once(const std::vector<std::string>& ids, std::chrono::seconds limit,
                             job::State state = job::State::kSucceeded) {
    auto open = ids;
    EXPECT_TRUE(until(
        [&] {
          std::erase_if(open, [&](const std::string& id) { return ended(id); });
          return open.empty();
        },
        limit))
        << open.size() << " of " << ids.size() << " jobs have not ended; the first, "
        << (open.empty() ? "" : open.front() + ":" + history(open.front()));
    int reported = 0;
    for (const auto& id : ids) {
      const auto record = job(id);
      EXPECT_TRUE(record.has_value()) << id << " does not exist";
      if (!record) continue;
      EXPECT_EQ(record->state, state) << id << history(id) << (record->error ? record->error->message : "");
      EXPECT_EQ(faults_in(events(id), {.max_attempts = max_attempts_}), "") << id << history(id);
      if (::testing::Test::HasFailure() && ++reported == 5) break;
    }
  }
  // The store that the manifest names.
  Result<std::shared_ptr<results::Store>> store_of(const results::Manifest& manifest) {
    results::StoreOptions options;
    options.backend = manifest.backend;
    options.dir = dir_ + "/data/results";
    return results::open_store(options, connection_);
  }
  // The image's bytes, verified against the manifest.
  std::string image(const std::string& id) {
    const auto record = job(id);
    if (!record || record->unit_records.empty()) return "no record";
    auto manifest = results::Manifest::parse(record->unit_records[0].manifest);
    if (!manifest) return "no manifest";
    auto store = store_of(*manifest);
    if (!store) return store.error().message;
    auto bytes = wait((*store)->get(*manifest, soon()));
    return bytes ? *bytes : bytes.error().message;
  }
  json::object ready_file() const {
    auto text = read_file(dir_ + "/ready.json");
    auto value = text ? parse_json(*text) : Result<json::value>(text.error());
    return value && value->is_object() ? value->as_object() : json::object();
  }
  std::string tail_of_log() const {
    auto text = read_file(dir_ + "/up.log");
    if (!text) return {};
    return "--- end of up.log\n" + text->substr(text->size() > 6000 ? text->size() - 6000 : 0);
  }

  asio::io_context io_;
  std::string dir_;
  pid_t up_ = -1;
  int max_attempts_ = HistoryRules().max_attempts;
  std::string gateway_;
  std::shared_ptr<redis::Connection> connection_;
  std::unique_ptr<queue::Client> client_;

 private:
  asio::awaitable<bool> pause(std::chrono::milliseconds time) {
    asio::steady_timer timer(io_, time);
    co_await timer.async_wait(asio::use_awaitable);
    co_return true;
  }
};

}  // namespace ditfleet::testing
