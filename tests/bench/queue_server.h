// The private Redis of queue_bench and what it reports about itself.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "shared/core/result.h"
#include "tests/system/private_redis.h"

struct redisContext;

namespace ditfleet::bench {

// Runs in a folder of its own, which the destructor removes. Blocks; not thread safe.
class BenchServer {
 public:
  static Result<std::unique_ptr<BenchServer>> start(const std::string& dir, const std::string& appendfsync);
  ~BenchServer();
  BenchServer(const BenchServer&) = delete;
  BenchServer& operator=(const BenchServer&) = delete;

  std::string url() const { return server_.url(); }
  // The numbers of Redis' INFO; empty if Redis does not answer.
  std::map<std::string, double> info();
  // As of the last info().
  const std::string& version() const { return version_; }
  // CPU time of Redis' main thread per call of a Function that does nothing, in microseconds, with 64 calls sent
  // together. It measures the speed of this machine's Redis. kUnavailable: Redis does not answer.
  Result<double> empty_call_us();
  // Ends Redis with SIGTERM, so that a profiler around it can write its results. The destructor kills it.
  void stop() { server_.stop(); }

 private:
  explicit BenchServer(redis::PrivateServer server) : server_(std::move(server)) {}
  redisContext* connection();

  redis::PrivateServer server_;
  redisContext* context_ = nullptr;
  std::string version_ = "?";
};

// CPU time in an info(): of all threads of Redis, and of the thread that runs commands.
double cpu_seconds(std::map<std::string, double>& info);
double main_cpu_seconds(std::map<std::string, double>& info);

}  // namespace ditfleet::bench
