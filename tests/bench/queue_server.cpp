#include "tests/bench/queue_server.h"

#include <hiredis/hiredis.h>

#include <cstdlib>
#include <filesystem>
#include <string_view>

namespace ditfleet::bench {

Result<std::unique_ptr<BenchServer>> BenchServer::start(const std::string& dir, const std::string& appendfsync) {
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  redis::ServerConfig config;
  config.dir = dir;
  config.unix_socket = dir + "/redis.sock";
  config.appendfsync = appendfsync;
  auto server = redis::PrivateServer::start(config);
  if (!server) return server.error();
  return std::unique_ptr<BenchServer>(new BenchServer(std::move(*server)));
}

BenchServer::~BenchServer() {
  if (context_ != nullptr) redisFree(context_);
  server_.kill();
  std::error_code ignored;
  std::filesystem::remove_all(server_.config().dir, ignored);
}

redisContext* BenchServer::connection() {
  if (context_ == nullptr) context_ = redisConnectUnix(server_.config().unix_socket.c_str());
  return context_;
}

std::map<std::string, double> BenchServer::info() {
  std::map<std::string, double> out;
  auto* reply = static_cast<redisReply*>(redisCommand(connection(), "INFO everything"));
  if (reply == nullptr) return out;
  std::string_view text(reply->str, reply->len);
  while (!text.empty()) {
    const auto end = text.find("\r\n");
    const std::string_view line = text.substr(0, end);
    if (const auto colon = line.find(':'); colon != std::string_view::npos) {
      if (line.substr(0, colon) == "redis_version") version_ = line.substr(colon + 1);
      out.emplace(line.substr(0, colon), std::atof(std::string(line.substr(colon + 1)).c_str()));
    }
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 2);
  }
  freeReplyObject(reply);
  return out;
}

Result<double> BenchServer::empty_call_us() {
  constexpr int kRounds = 4000, kTogether = 64;
  const Error gone{Code::kUnavailable, "the private Redis does not answer", {}};
  const auto receive = [&] {
    void* reply = nullptr;
    const bool good =
        redisGetReply(connection(), &reply) == REDIS_OK && static_cast<redisReply*>(reply)->type != REDIS_REPLY_ERROR;
    freeReplyObject(reply);
    return good;
  };
  redisAppendCommand(connection(), "FUNCTION LOAD REPLACE %s",
                     "#!lua name=yardstick\nredis.register_function('yardstick', function() return 1 end)");
  if (!receive()) return gone;
  auto before = info();
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < kTogether; ++i) redisAppendCommand(connection(), "FCALL yardstick 0");
    for (int i = 0; i < kTogether; ++i)
      if (!receive()) return gone;
  }
  auto after = info();
  return (main_cpu_seconds(after) - main_cpu_seconds(before)) / (kRounds * kTogether) * 1e6;
}

double cpu_seconds(std::map<std::string, double>& info) { return info["used_cpu_user"] + info["used_cpu_sys"]; }
double main_cpu_seconds(std::map<std::string, double>& info) {
  return info["used_cpu_user_main_thread"] + info["used_cpu_sys_main_thread"];
}

}  // namespace ditfleet::bench
