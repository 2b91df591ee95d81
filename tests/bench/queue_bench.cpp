// What the queue does on this machine, with workers that run nothing, on a private Redis (append-only, everysec).
// README.md explains the scenarios and their figures.
#include <spdlog/fmt/fmt.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "tests/bench/queue_load.h"
#include "tests/bench/queue_server.h"
#include "tests/bench/takeover.h"

namespace ditfleet::bench {
namespace {

struct Options {
  std::string scenario = "all";
  int seconds = 60;
  int producers = 64, running = 64, workers = 4, window = 1024;
  std::int64_t jobs = 1000;
  std::string csv, appendfsync = "everysec", revision = "unknown", dir = "/tmp";
};

double percentile(std::vector<double>& sorted, double p) {
  if (sorted.empty()) return 0;
  return sorted[std::min(sorted.size() - 1, static_cast<std::size_t>(static_cast<double>(sorted.size()) * p))];
}

std::string machine_name() {
  std::ifstream in("/proc/cpuinfo");
  std::string line, model = "unknown CPU";
  while (std::getline(in, line)) {
    if (line.starts_with("model name")) {
      model = line.substr(line.find(':') + 2);
      break;
    }
  }
  std::replace(model.begin(), model.end(), ',', ' ');
  return std::to_string(std::thread::hardware_concurrency()) + " x " + model;
}

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {}

  int run() {
    static const std::map<std::string, Result<void> (Bench::*)()> kScenarios = {
        {"yardstick", &Bench::yardstick}, {"throughput", &Bench::throughput}, {"shards", &Bench::shards},
        {"latency", &Bench::latency},     {"memory", &Bench::memory},         {"serial", &Bench::serial},
        {"takeover", &Bench::takeover}};
    for (const char* name : {"yardstick", "latency", "throughput", "shards", "memory", "takeover", "serial"}) {
      if (options_.scenario != name && (options_.scenario != "all" || std::string_view(name) == "serial")) continue;
      scenario_ = name;
      if (auto done = (this->*kScenarios.at(name))(); !done) {
        std::fprintf(stderr, "queue_bench: %s: %s\n", name, done.error().message.c_str());
        return 1;
      }
    }
    return 0;
  }

 private:
  Result<std::unique_ptr<BenchServer>> server(int index) {
    auto started =
        BenchServer::start(options_.dir + "/ditfleet-bench-" + std::to_string(::getpid()) + "-" + std::to_string(index),
                           options_.appendfsync);
    if (started) {
      (*started)->info();
      version_ = (*started)->version();
    }
    return started;
  }

  LoadOptions load(const BenchServer& server) const {
    LoadOptions load;
    load.redis_url = server.url();
    load.producers = options_.producers;
    load.running = options_.running;
    load.workers = options_.workers;
    load.window = options_.window;
    load.queue.lease_ms = 60'000;  // units wait in the workers' queues without a renewal
    return load;
  }

  void report(const char* metric, double value, const char* unit) {
    std::fputs(fmt::format("{:<12} {:<36} {:>14.2f} {}\n", scenario_, metric, value, unit).c_str(), stdout);
    std::fflush(stdout);
    if (options_.csv.empty()) return;
    const bool fresh = !std::filesystem::exists(options_.csv);
    std::ofstream out(options_.csv, std::ios::app);
    if (fresh) out << "date,revision,machine,versions,system,scenario,metric,value,unit\n";
    char date[32];
    const std::time_t now = std::time(nullptr);
    std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
    out << fmt::format("{},{},{},redis {},ditfleet,{},{},{:.3f},{}\n", date, options_.revision, machine_name(),
                       version_, scenario_, metric, value, unit);
  }

  Result<void> yardstick() {
    auto one = server(0);
    if (!one) return one.error();
    const auto call = (*one)->empty_call_us();
    if (!call) return call.error();
    report("empty_call", *call, "us");
    return {};
  }

  Result<void> throughput() {
    auto one = server(0);
    if (!one) return one.error();
    BenchServer& redis = **one;
    auto before = redis.info();
    LoadOptions options = load(redis);
    options.seconds = options_.seconds;
    const auto result = run_load(options);
    if (!result) return result.error();
    auto after = redis.info();
    const double jobs = static_cast<double>(result->finished);
    one_shard_per_s_ = jobs / result->seconds;
    report("jobs_per_s", one_shard_per_s_, "jobs/s");
    report("jobs", jobs, "jobs");
    report("redis_cpu_per_job", (cpu_seconds(after) - cpu_seconds(before)) / jobs * 1e6, "us");
    report("redis_main_thread_cpu_per_job", (main_cpu_seconds(after) - main_cpu_seconds(before)) / jobs * 1e6, "us");
    report("redis_cores", (cpu_seconds(after) - cpu_seconds(before)) / result->seconds, "cores");
    report("client_cpu_per_job", result->client_cpu_seconds / jobs * 1e6, "us");
    report("client_cores", result->client_cpu_seconds / result->seconds, "cores");
    report("redis_memory_per_finished_job", (after["used_memory"] - before["used_memory"]) / jobs, "bytes");
    report("aof_rewrites", after["aof_rewrites"] - before["aof_rewrites"], "rewrites");
    report("feed_events_per_job", static_cast<double>(result->feed_events) / jobs, "events");
    return {};
  }

  Result<void> shards() {
    std::vector<std::unique_ptr<BenchServer>> servers;
    std::vector<std::optional<Result<LoadResult>>> results(2);
    for (int i = 0; i < 2; ++i) {
      auto started = server(i);
      if (!started) return started.error();
      servers.push_back(std::move(*started));
    }
    std::vector<std::thread> threads;
    double redis_cpu = 0;
    for (int i = 0; i < 2; ++i) {
      auto before = servers[i]->info();
      redis_cpu -= cpu_seconds(before);
      threads.emplace_back([&, i] {
        LoadOptions options = load(*servers[i]);
        options.queue.shard = i;
        options.seconds = options_.seconds;
        results[i].emplace(run_load(options));
      });
    }
    for (auto& thread : threads) thread.join();
    double per_s = 0, jobs = 0, client_cpu = 0;
    for (int i = 0; i < 2; ++i) {
      if (!results[i]->ok()) return results[i]->error();
      const LoadResult& result = **results[i];
      per_s += static_cast<double>(result.finished) / result.seconds;
      jobs += static_cast<double>(result.finished);
      client_cpu += result.client_cpu_seconds;
      auto after = servers[i]->info();
      redis_cpu += cpu_seconds(after);
    }
    report("jobs_per_s", per_s, "jobs/s");
    report("redis_cpu_per_job", redis_cpu / jobs * 1e6, "us");
    report("client_cpu_per_job", client_cpu / jobs * 1e6, "us");
    if (one_shard_per_s_ > 0) report("ratio_to_one_shard", per_s / one_shard_per_s_, "x");
    return {};
  }

  Result<void> latency() {
    auto one = server(0);
    if (!one) return one.error();
    LoadOptions options = load(**one);
    options.producers = options.running = options.workers = 1;
    options.rate = 100;  // per second: the job before has long ended
    options.jobs = 2000;
    auto result = run_load(options);
    if (!result) return result.error();
    auto& v = result->submit_to_started_us;
    std::sort(v.begin(), v.end());
    report("submit_to_started_p50", percentile(v, .5) / 1e3, "ms");
    report("submit_to_started_p99", percentile(v, .99) / 1e3, "ms");
    report("submit_to_started_max", v.empty() ? 0 : v.back() / 1e3, "ms");
    return {};
  }

  Result<void> memory() {
    auto one = server(0);
    if (!one) return one.error();
    BenchServer& redis = **one;
    LoadOptions options = load(redis);
    options.queue.retention_ms = options.queue.idempotency_ms = 5000;
    options.rate = 4000;  // per second: after 50,000 jobs (12.5 s) as many are forgotten as finish
    options.jobs = 200'000;
    options.marks = {50'000, 200'000};
    std::map<std::int64_t, double> used;
    options.on_mark = [&](std::int64_t finished) { used[finished] = redis.info()["used_memory"]; };
    const auto result = run_load(options);
    if (!result) return result.error();
    report("used_memory_after_50000", used[50'000] / 1e6, "MB");
    report("used_memory_after_200000", used[200'000] / 1e6, "MB");
    report("ratio", used[200'000] / std::max(1.0, used[50'000]), "x");
    return {};
  }

  Result<void> takeover() {
    auto one = server(0);
    if (!one) return one.error();
    const auto result = take_over((*one)->url());
    if (!result) return result.error();
    report("first_start_s", result->first_start_s, "s");
    report("longest_call_ms", result->longest_call_ms, "ms");
    return {};
  }

  // One job after the other, so that every job costs the same calls. For counting Redis' instructions.
  Result<void> serial() {
    auto one = server(0);
    if (!one) return one.error();
    LoadOptions options = load(**one);
    options.producers = options.running = options.workers = options.window = 1;
    options.jobs = options_.jobs;
    const auto result = run_load(options);
    if (!result) return result.error();
    report("jobs", static_cast<double>(result->finished), "jobs");
    (*one)->stop();
    return {};
  }

  const Options& options_;
  std::string scenario_, version_ = "?";
  double one_shard_per_s_ = 0;
};

}  // namespace
}  // namespace ditfleet::bench

int main(int argc, char** argv) {
  using namespace ditfleet::bench;
  CLI::App app("Measures the job queue on a private Redis, with workers that run nothing", "queue_bench");
  Options options;
  app.add_option("--scenario", options.scenario, "What to measure")
      ->check(CLI::IsMember({"all", "yardstick", "latency", "throughput", "shards", "memory", "takeover", "serial"}))
      ->capture_default_str();
  app.add_option("--seconds", options.seconds, "Seconds that throughput and shards submit jobs")
      ->check(CLI::Range(1, 3600))
      ->capture_default_str();
  app.add_option("--producers", options.producers, "Concurrent producers per shard")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--running", options.running, "Units that run at the same time per shard")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--workers", options.workers, "Workers per shard, which share the running units")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--window", options.window, "Jobs submitted and not ended per shard")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--jobs", options.jobs, "Jobs of the scenario serial, which `all` leaves out")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--fsync", options.appendfsync, "appendfsync of Redis")
      ->check(CLI::IsMember({"always", "everysec", "no"}))
      ->capture_default_str();
  app.add_option("--csv", options.csv, "Append the figures to this file")->type_name("FILE");
  app.add_option("--revision", options.revision, "The revision in the rows of --csv")->capture_default_str();
  app.add_option("--dir", options.dir, "Folder for the files of Redis")->type_name("DIR")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return Bench(options).run();
}
