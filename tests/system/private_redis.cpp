#include "tests/system/private_redis.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <thread>
#include <utility>

#include "shared/redis/connection.h"

namespace ditfleet::redis {
namespace {

bool accepts(const ServerConfig& config) {
  const bool local = !config.unix_socket.empty();
  const int fd = ::socket(local ? AF_UNIX : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  int rc = -1;
  if (local) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, config.unix_socket.c_str(), sizeof address.sun_path - 1);
    rc = ::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address);
  } else {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(config.port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    rc = ::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address);
  }
  ::close(fd);
  return rc == 0;
}

std::string last_line(const std::string& path) {
  std::ifstream in(path);
  std::string line, last;
  while (std::getline(in, line)) {
    if (!line.empty()) last = line;
  }
  return last;
}

}  // namespace

Result<PrivateServer> PrivateServer::start(ServerConfig config, std::chrono::milliseconds timeout) {
  sockaddr_un limit{};
  if (config.unix_socket.size() >= sizeof limit.sun_path) {
    return invalid_argument("[redis] the socket path " + config.unix_socket + " is longer than the system's " +
                            std::to_string(sizeof limit.sun_path - 1) + " bytes; use a shorter data folder");
  }
  PrivateServer server(std::move(config));
  if (auto up = server.launch(timeout); !up) return up.error();
  return server;
}

PrivateServer& PrivateServer::operator=(PrivateServer&& other) noexcept {
  std::swap(config_, other.config_);
  std::swap(process_, other.process_);
  return *this;
}

PrivateServer::~PrivateServer() { stop(); }

Result<void> PrivateServer::launch(std::chrono::milliseconds timeout) {
  const std::string conf = config_.dir + "/redis.conf", log = config_.dir + "/redis.log";
  {
    std::ofstream out(conf, std::ios::trunc);
    out << redis_server_config(config_);
    if (!out.flush()) return Error{Code::kUnavailable, "[redis] cannot write " + conf};
  }
  ::unlink(config_.unix_socket.c_str());  // a killed server leaves its socket behind
  // SIGTERM lets Redis save its data. A process group of its own keeps it from Ctrl-C at the terminal.
  ProcessSpec spec{.argv = {"redis-server", conf}, .output_file = log, .death_signal = SIGTERM};
  auto started = ChildProcess::start(spec);
  if (!started) {
    return Error{started.error().code,
                 "[redis] " + started.error().message + "; install Debian's redis-server or configure redis.url"};
  }
  process_ = std::move(*started);
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (!accepts(config_)) {
    if (!running()) {
      return unavailable("[redis] redis-server ended at once: " + last_line(log) + " (" + log + ")");
    }
    if (std::chrono::steady_clock::now() > end) {
      kill();
      return unavailable("[redis] redis-server was not up after " + std::to_string(timeout.count()) +
                         " ms: " + last_line(log) + " (" + log + ")");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return {};
}

Result<void> PrivateServer::restart(std::chrono::milliseconds timeout) {
  stop();
  return launch(timeout);
}

bool PrivateServer::running() const {
  siginfo_t info{};
  return process_.running() && ::waitid(P_PID, static_cast<id_t>(pid()), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
         info.si_pid == 0;
}

void PrivateServer::stop() {
  process_.send(SIGTERM);
  for (int i = 0; i < 2000 && running(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  kill();
}

void PrivateServer::kill() {
  if (!process_.running()) return;
  process_.send(SIGKILL);
  (void)process_.wait();
}

std::string PrivateServer::url() const {
  Endpoint endpoint;
  endpoint.unix_path = config_.unix_socket;
  endpoint.port = config_.port;
  endpoint.tls = config_.unix_socket.empty() && !config_.tls_cert_file.empty();
  endpoint.password = config_.password;
  return endpoint.url();
}

}  // namespace ditfleet::redis
