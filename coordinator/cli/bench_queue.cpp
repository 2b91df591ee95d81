#include "coordinator/cli/bench_queue.h"

#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "coordinator/cli/bench_queue_load.h"
#include "coordinator/cli/bench_queue_server.h"
#include "shared/core/json.h"

namespace ditfleet::cli {
namespace {

std::atomic<bool> stop_asked{false};
std::atomic<int> stop_signal{0};
static_assert(std::atomic<bool>::is_always_lock_free &&
              std::atomic<int>::is_always_lock_free);  // else no signal handler may

void ask_to_stop(int signal) {
  stop_signal = signal;
  stop_asked = true;
}

// While it lives, what would end the process only asks to stop, so that the private Redis and its folder go first. A
// reader that went away is one of those: `| head` is no failure.
class StopSignals {
 public:
  StopSignals() {
    for (const int signal : kSignals) {
      struct sigaction action {};
      action.sa_handler = ask_to_stop;
      // A second Ctrl-C ends it at once; a second line to a reader that is gone must not.
      action.sa_flags = SA_RESTART | (signal == SIGPIPE ? 0 : static_cast<int>(SA_RESETHAND));
      ::sigaction(signal, &action, nullptr);
    }
  }
  ~StopSignals() {
    for (const int signal : kSignals) std::signal(signal, SIG_DFL);
  }
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

 private:
  static constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP, SIGPIPE};
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
  explicit Bench(const BenchQueueOptions& options) : options_(options) {}

  int run() {
    static const std::map<std::string, Result<void> (Bench::*)()> kScenarios = {{"yardstick", &Bench::yardstick},
                                                                                {"throughput", &Bench::throughput},
                                                                                {"shards", &Bench::shards},
                                                                                {"latency", &Bench::latency},
                                                                                {"memory", &Bench::memory}};
    if (options_.scenario != "all" && !kScenarios.contains(options_.scenario)) {
      std::fprintf(
          stderr, "bench queue: the scenario is '%s'; it takes all, yardstick, throughput, shards, latency or memory\n",
          options_.scenario.c_str());
      return 2;
    }
    for (const char* name : {"yardstick", "latency", "throughput", "shards", "memory"}) {
      if (options_.scenario != "all" && options_.scenario != name) continue;
      if (stop_asked) return 1;
      scenario_ = name;
      if (auto done = (this->*kScenarios.at(name))(); !done) {
        if (stop_asked) return 1;
        std::fprintf(stderr, "bench queue %s: %s\n", name, done.error().message.c_str());
        return 1;
      }
    }
    return 0;
  }

 private:
  Result<std::unique_ptr<BenchServer>> server(int index) {
    std::string base = options_.dir.empty() ? "/tmp" : options_.dir;
    auto started = BenchServer::start(
        base + "/ditfleet-bench-" + std::to_string(::getpid()) + "-" + std::to_string(index), options_.appendfsync);
    if (started) {
      (*started)->info();
      version_ = (*started)->version();
    }
    return started;
  }

  LoadOptions load(const BenchServer& server) const {
    LoadOptions load;
    load.redis_url = server.url();
    load.batch = options_.batch;
    load.workers = options_.workers;
    load.window = options_.window;
    load.stop = &stop_asked;
    return load;
  }

  void report(const char* metric, double value, const char* unit) {
    const std::string line = options_.json
                                 ? json::serialize(json::object{
                                       {"scenario", scenario_}, {"metric", metric}, {"value", value}, {"unit", unit}})
                                 : fmt::format("{:<12} {:<36} {:>14.2f} {}", scenario_, metric, value, unit);
    std::fprintf(stdout, "%s\n", line.c_str());
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
    options.seconds = static_cast<double>(options_.duration.count());
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
        options.seconds = static_cast<double>(options_.duration.count());
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
    options.batch = 1;
    options.workers = 1;
    options.producers = 1;
    options.rate = 100;  // a job every 10 ms: the one before has long ended
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
    options.rate = 4000;  // after 50,000 jobs (12.5 s) as many expire as finish
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

  const BenchQueueOptions& options_;
  std::string scenario_, version_ = "?";
  double one_shard_per_s_ = 0;
};

}  // namespace

int run_bench_queue(const BenchQueueOptions& options) {
  int code = 0;
  {
    const StopSignals signals;
    code = Bench(options).run();
  }
  if (stop_asked) std::raise(stop_signal);  // ended as whoever waits for it expects
  return code;
}

}  // namespace ditfleet::cli
