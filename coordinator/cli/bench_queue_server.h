// The private Redis of a bench, and what it says of itself.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "shared/core/result.h"
#include "shared/redis/private_server.h"

struct redisContext;

namespace ditfleet::cli {

// In a folder of its own, which goes with it. Blocking, one thread: the load has its own connections.
class BenchServer {
 public:
  static Result<std::unique_ptr<BenchServer>> start(const std::string& dir, const std::string& appendfsync);
  ~BenchServer();
  BenchServer(const BenchServer&) = delete;
  BenchServer& operator=(const BenchServer&) = delete;

  std::string url() const { return server_.url(); }
  // Redis' INFO, as numbers; empty if it does not answer.
  std::map<std::string, double> info();
  // As the last info() said.
  const std::string& version() const { return version_; }
  // Microseconds of its main thread that a Function costs which does nothing, 64 calls sent together: how fast this
  // machine's Redis is, whatever the queue does. kUnavailable: it does not answer.
  Result<double> empty_call_us();

 private:
  explicit BenchServer(redis::PrivateServer server) : server_(std::move(server)) {}
  redisContext* connection();

  redis::PrivateServer server_;
  redisContext* context_ = nullptr;
  std::string version_ = "?";
};

// Of an info(): processor time of all its threads, and of the one that runs commands.
double cpu_seconds(std::map<std::string, double>& info);
double main_cpu_seconds(std::map<std::string, double>& info);

}  // namespace ditfleet::cli
