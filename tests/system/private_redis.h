// A private redis-server as a child process, for benchmarks and tests. It ends with this process.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "shared/core/child_process.h"
#include "shared/core/result.h"
#include "shared/redis/server_config.h"

namespace ditfleet::redis {

// Not thread safe. All calls block.
class PrivateServer {
 public:
  // Writes `config.dir`/redis.conf, starts redis-server (from PATH) on it and waits until its socket or
  // port accepts. kNotFound: no redis-server; kUnavailable: it ended or was not up within `timeout`, with
  // the last line of its log.
  static Result<PrivateServer> start(ServerConfig config, std::chrono::milliseconds timeout = std::chrono::seconds(15));
  PrivateServer(PrivateServer&& other) noexcept = default;
  PrivateServer& operator=(PrivateServer&& other) noexcept;
  ~PrivateServer();  // stop()

  void stop();  // SIGTERM and wait; SIGKILL after 10 s
  void kill();  // SIGKILL and wait, as a crash
  // The same server again on the same folder, after stop() or kill().
  Result<void> restart(std::chrono::milliseconds timeout = std::chrono::seconds(15));

  bool running() const;
  pid_t pid() const { return process_.pid(); }
  const ServerConfig& config() const { return config_; }
  std::string url() const;  // of the unix socket if there is one, else of the port; with the password

 private:
  explicit PrivateServer(ServerConfig config) : config_(std::move(config)) {}
  Result<void> launch(std::chrono::milliseconds timeout);
  ServerConfig config_;
  ChildProcess process_;
};

}  // namespace ditfleet::redis
