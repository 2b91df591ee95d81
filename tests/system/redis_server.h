// A redis-server for one test: its own folder, a unix socket (or a loopback port, with TLS or a password),
// ended by its pid. kill() is SIGKILL; restart() starts it again on what the folder holds.
#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>

#include "shared/redis/connection.h"
#include "tests/system/private_redis.h"

namespace ditfleet::testing {

inline int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  ::bind(fd, reinterpret_cast<sockaddr*>(&address), size);
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  ::close(fd);
  return ntohs(address.sin_port);
}

class RedisServer {
 public:
  struct Options {
    bool tcp = false;  // a loopback port instead of a unix socket
    bool tls = false;  // implies tcp; a fresh self-signed certificate for 127.0.0.1 and localhost
    std::string password;
    std::string appendfsync = "always";
    std::vector<std::string> extra;  // lines of redis.conf
  };

  RedisServer() : RedisServer(Options()) {}
  explicit RedisServer(const Options& options) {
    char folder[] = "/tmp/ditfleet-redis-XXXXXX";
    if (::mkdtemp(folder) == nullptr) throw std::runtime_error("cannot make a folder in /tmp");
    dir_ = folder;
    redis::ServerConfig config;
    config.dir = dir_;
    config.appendfsync = options.appendfsync;
    config.password = options.password;
    config.extra = options.extra;
    if (options.tcp || options.tls) {
      config.port = free_port();
    } else {
      config.unix_socket = dir_ + "/redis.sock";
    }
    if (options.tls) {
      config.tls_cert_file = dir_ + "/cert.pem";
      config.tls_key_file = dir_ + "/key.pem";
      config.tls_ca_file = config.tls_cert_file;
      const std::string command =
          "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
          "-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout " +
          config.tls_key_file + " -out " + config.tls_cert_file + " 2>/dev/null";
      if (std::system(command.c_str()) != 0) throw std::runtime_error("openssl made no certificate");
    }
    auto server = redis::PrivateServer::start(config);
    if (!server) throw std::runtime_error(server.error().message);
    server_.emplace(std::move(*server));
  }
  ~RedisServer() {
    server_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(dir_, ignored);
  }
  RedisServer(const RedisServer&) = delete;

  void kill() { server_->kill(); }
  void stop() { server_->stop(); }
  void restart() {
    auto up = server_->restart();
    if (!up) throw std::runtime_error(up.error().message);
  }
  pid_t pid() const { return server_->pid(); }
  std::string url() const { return server_->url(); }
  std::string ca_file() const { return server_->config().tls_ca_file; }
  redis::Endpoint endpoint() const {
    auto endpoint = redis::Endpoint::parse(url());
    if (!endpoint) throw std::runtime_error(endpoint.error().message);
    endpoint->tls_ca_file = ca_file();
    return *endpoint;
  }

 private:
  std::string dir_;
  std::optional<redis::PrivateServer> server_;
};

}  // namespace ditfleet::testing
