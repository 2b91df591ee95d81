#include "tests/system/private_redis.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <thread>
#include <utility>

#include "shared/core/fork_child.h"
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

// What the child does; answers only if it could not become redis-server. Between fork and exec: async-signal-safe
// calls alone.
[[noreturn]] void become_redis(const char* conf, int log, int null, int tell, pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);     // not SIGKILL: it writes what it has before it goes
  if (::getppid() != parent) ::_exit(1);  // it died in between
  // A group of its own: a Ctrl-C at the terminal must not take Redis before those who use it.
  ::setpgid(0, 0);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::dup2(null, STDIN_FILENO);
  ::dup2(log, STDOUT_FILENO);
  ::dup2(log, STDERR_FILENO);
  ::execlp("redis-server", "redis-server", conf, static_cast<char*>(nullptr));
  const int why = errno;
  (void)!::write(tell, &why, sizeof why);
  ::_exit(127);
}

// The pid, or in `why` the errno that kept it from starting.
pid_t spawn_redis(const std::string& conf, const std::string& log_path, int& why) {
  const int log = ::open(log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  std::array<int, 2> told{-1, -1};  // closed by a successful exec
  pid_t pid = -1;
  if (log >= 0 && null >= 0 && ::pipe2(told.data(), O_CLOEXEC) == 0) {
    const pid_t parent = ::getpid();
    pid = fork_child([&, name = conf.c_str()] { become_redis(name, log, null, told[1], parent); });
    why = pid < 0 ? -pid : 0;
  } else {
    why = errno;
  }
  for (const int fd : {log, null, told[1]}) {
    if (fd >= 0) ::close(fd);
  }
  if (pid > 0 && ::read(told[0], &why, sizeof why) == static_cast<ssize_t>(sizeof why)) {
    ::waitpid(pid, nullptr, 0);
    pid = -1;
  }
  if (told[0] >= 0) ::close(told[0]);
  return pid;
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

PrivateServer::PrivateServer(PrivateServer&& other) noexcept
    : config_(std::move(other.config_)), pid_(std::exchange(other.pid_, -1)) {}

PrivateServer& PrivateServer::operator=(PrivateServer&& other) noexcept {
  if (this != &other) {
    stop();
    config_ = std::move(other.config_);
    pid_ = std::exchange(other.pid_, -1);
  }
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
  int why = 0;
  pid_ = spawn_redis(conf, log, why);
  if (pid_ < 0) {
    return Error{Code::kNotFound, std::string("[redis] cannot start redis-server: ") + std::strerror(why) +
                                      "; install Debian's redis-server or configure redis.url"};
  }
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
  if (pid_ <= 0) return false;
  siginfo_t info{};
  return ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0;
}

void PrivateServer::stop() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGTERM);
  for (int i = 0; i < 2000 && running(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  kill();
}

void PrivateServer::kill() {
  if (pid_ <= 0) return;
  if (running()) ::kill(pid_, SIGKILL);
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
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
