// For tests of the kernel cache: folders, programs, a compiler that counts, processes, a look into Redis, counters.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <hiredis/hiredis.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "shared/kernel_cache/cache.h"
#include "shared/kernel_cache/codec.h"
#include "shared/kernel_cache/redis_tier.h"
#include "shared/kernel_cache/secret.h"
#include "shared/telemetry/metrics.h"
#include "tests/system/redis_server.h"
#include "tests/system/temporary_folder.h"

namespace ditfleet::kernel_cache::testing {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

inline std::shared_ptr<const Secret> secret_of(const std::string& text) { return *Secret::from_text(text); }
inline const std::string kSecretText = "the secret of this cluster";

inline Key key_of(int number) { return KeyBuilder().add("number", number).finish(); }

inline Entry program_of(int number, std::size_t bytes = 2000) {
  Entry entry;
  entry.region = "region-" + std::to_string(number);
  entry.arch = "sm_90a";
  entry.kernels = {{"kernel", {8, 4}, 0, 32, 0}};
  std::uint64_t state = static_cast<std::uint64_t>(number) + 1;
  while (entry.code.size() < bytes) {  // bytes that do not compress
    state = state * 6364136223846793005u + 1442695040888963407u;
    entry.code += static_cast<char>(state >> 56);
  }
  return entry;
}

using Folder = ditfleet::testing::TemporaryFolder;

// A compiler that notes each start as a line of a file, which all processes of a test share.
class Compiler {
 public:
  explicit Compiler(std::string log, milliseconds takes = milliseconds(0)) : log_(std::move(log)), takes_(takes) {}
  Result<KernelCache::Program> get(KernelCache& cache, int number, std::size_t bytes = 2000,
                                   const KernelCache::Validator& usable = {}) const {
    return cache.get_or_compile(
        key_of(number), "region-" + std::to_string(number), "sm_90a",
        [&]() -> Result<Entry> {
          const std::string line = std::to_string(number) + "\n";
          const int fd = ::open(log_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
          (void)!::write(fd, line.data(), line.size());
          ::close(fd);
          std::this_thread::sleep_for(takes_);
          return program_of(number, bytes);
        },
        usable);
  }
  // How often each number was compiled.
  std::map<int, int> compiled() const {
    std::map<int, int> counts;
    std::ifstream in(log_);
    for (int number = 0; in >> number;) ++counts[number];
    return counts;
  }
  int total() const {
    int sum = 0;
    for (const auto& [number, times] : compiled()) sum += times;
    return sum;
  }

 private:
  std::string log_;
  milliseconds takes_;
};

// A process of the test's own: runs `work`, and says what it returned. Fork it before this process has threads.
class Process {
 public:
  explicit Process(const std::function<std::string()>& work) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
    pid_ = ::fork();
    if (pid_ == 0) {
      const std::string text = work();
      (void)!::write(ends[1], text.data(), text.size());
      ::_exit(0);
    }
    ::close(ends[1]);
    out_ = ends[0];
  }
  ~Process() {
    kill();
    ::close(out_);
  }
  Process(const Process&) = delete;
  // What it said; "" if it was killed, or does not end within `limit`.
  std::string wait(milliseconds limit = std::chrono::seconds(60)) {
    std::string text;
    const auto until = steady_clock::now() + limit;
    for (char buffer[4096];;) {
      pollfd ready{out_, POLLIN, 0};
      const auto left = std::chrono::duration_cast<milliseconds>(until - steady_clock::now()).count();
      if (left <= 0 || ::poll(&ready, 1, static_cast<int>(left)) <= 0) return {};
      const ssize_t n = ::read(out_, buffer, sizeof buffer);
      if (n <= 0) break;
      text.append(buffer, static_cast<std::size_t>(n));
    }
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
    return text;
  }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
  int out_ = -1;
};

// A plain look into Redis, from outside.
class RedisView {
 public:
  explicit RedisView(const redis::Endpoint& endpoint) : context_(redisConnectUnix(endpoint.unix_path.c_str())) {}
  ~RedisView() { redisFree(context_); }
  RedisView(const RedisView&) = delete;
  // Text of strings and errors, digits of integers, elements of arrays joined with spaces.
  std::string operator()(const std::vector<std::string>& words) {
    std::vector<const char*> argv;
    std::vector<std::size_t> sizes;
    for (const auto& word : words) {
      argv.push_back(word.data());
      sizes.push_back(word.size());
    }
    auto* reply =
        static_cast<redisReply*>(redisCommandArgv(context_, static_cast<int>(argv.size()), argv.data(), sizes.data()));
    const std::string text = reply ? text_of(*reply) : "no reply";
    if (reply) freeReplyObject(reply);
    return text;
  }

 private:
  static std::string text_of(const redisReply& reply) {
    if (reply.type == REDIS_REPLY_INTEGER) return std::to_string(reply.integer);
    if (reply.type != REDIS_REPLY_ARRAY) return std::string(reply.str ? reply.str : "", reply.len);
    std::string text;
    for (std::size_t i = 0; i < reply.elements; ++i) text += (i ? " " : "") + text_of(*reply.element[i]);
    return text;
  }
  redisContext* context_;
};

inline std::string redis_name(int number) { return "df:{0}:kernel:1:" + key_of(number).hex(); }

// A counter of this process; 0 if it was never counted.
inline double counter(const std::string& name, const std::string& labels) {
  std::istringstream lines(telemetry::render_metrics());
  // Labels come in an order of the library's: both ways are tried.
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(name + "{")) continue;
    bool all = true;
    std::istringstream wanted(labels);
    for (std::string label; std::getline(wanted, label, ',');) all = all && line.find(label) != std::string::npos;
    if (all) return std::stod(line.substr(line.rfind(' ') + 1));
  }
  return 0;
}
inline double lookups(const std::string& tier, const std::string& result) {
  return counter("ditfleet_kernel_cache_lookups_total", "tier=\"" + tier + "\",result=\"" + result + "\"");
}
inline double stores(const std::string& tier, const std::string& result) {
  return counter("ditfleet_kernel_cache_stores_total", "tier=\"" + tier + "\",result=\"" + result + "\"");
}

inline CacheOptions options_of(const std::string& dir, const ditfleet::testing::RedisServer* redis,
                               const std::string& secret = kSecretText) {
  CacheOptions options;
  options.dir = dir;
  if (redis) options.redis = redis->endpoint();
  options.secret = secret_of(secret);
  return options;
}

}  // namespace ditfleet::kernel_cache::testing
