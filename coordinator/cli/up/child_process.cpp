#include "coordinator/cli/up/child_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

#include "shared/core/fork_child.h"

namespace ditfleet::cli {
namespace {

constexpr std::size_t kMaxLogBytes = 16u << 20;
constexpr std::size_t kMaxLineBytes = 64u << 10;  // a longer one is cut into several
constexpr int kReadsAtOnce = 64;  // more than a pipe holds: a child that never pauses keeps up nobody else

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (const std::string& text : texts) out.push_back(const_cast<char*>(text.c_str()));
  out.push_back(nullptr);
  return out;
}

}  // namespace

std::string ChildEnd::text() const {
  if (signal != 0) return "was killed by signal " + std::to_string(signal);
  return "exited with status " + std::to_string(status);
}

ChildProcess::ChildProcess(ChildSpec spec) : spec_(std::move(spec)) {}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : spec_(std::move(other.spec_)),
      pid_(std::exchange(other.pid_, -1)),
      output_(std::exchange(other.output_, -1)),
      log_(std::exchange(other.log_, nullptr)),
      log_bytes_(other.log_bytes_),
      partial_(std::move(other.partial_)),
      last_line_(std::move(other.last_line_)) {}

ChildProcess::~ChildProcess() {
  if (output_ >= 0) ::close(output_);
  if (log_) std::fclose(log_);
}

Result<void> ChildProcess::start() {
  if (!log_) {
    log_ = std::fopen(spec_.log_file.c_str(), "ae");
    if (!log_) return unavailable("cannot write '" + spec_.log_file + "': " + std::strerror(errno));
    std::error_code ec;
    const auto size = std::filesystem::file_size(spec_.log_file, ec);
    log_bytes_ = ec ? 0 : size;
    turn_log_over();
  }
  std::array<int, 2> pipe_ends{};
  if (::pipe2(pipe_ends.data(), O_CLOEXEC) != 0)
    return unavailable(std::string("cannot make a pipe: ") + std::strerror(errno));

  // Everything that allocates happens before the fork.
  const auto argv = pointers(spec_.argv);
  const auto environment = pointers(spec_.environment);
  const pid_t parent = ::getpid();
  const pid_t pid = fork_child([&] {
    ::prctl(PR_SET_PDEATHSIG, spec_.death_signal);
    if (::getppid() != parent) ::_exit(1);  // it died in between
    ::setpgid(0, 0);
    sigset_t none;
    sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    const int null = ::open("/dev/null", O_RDONLY);
    if (null >= 0) ::dup2(null, STDIN_FILENO);
    ::dup2(pipe_ends[1], STDOUT_FILENO);
    ::dup2(pipe_ends[1], STDERR_FILENO);
    if (spec_.inherited_fd >= 0) ::fcntl(spec_.inherited_fd, F_SETFD, 0);
    ::execve(argv[0], argv.data(), environment.data());
    constexpr std::string_view kFailed = "cannot execute the program\n";
    (void)!::write(STDERR_FILENO, kFailed.data(), kFailed.size());
    ::_exit(127);
  });
  if (pid < 0) {
    ::close(pipe_ends[0]);
    ::close(pipe_ends[1]);
    return unavailable("cannot start " + spec_.label + ": " + std::strerror(-pid));
  }
  ::close(pipe_ends[1]);
  if (output_ >= 0) ::close(output_);
  output_ = pipe_ends[0];
  ::fcntl(output_, F_SETFL, O_NONBLOCK);
  pid_ = pid;
  return {};
}

void ChildProcess::send(int signal) const {
  if (pid_ > 0) ::kill(pid_, signal);
}

std::optional<ChildEnd> ChildProcess::reap() {
  if (pid_ <= 0) return std::nullopt;
  int status = 0;
  const pid_t reaped = ::waitpid(pid_, &status, WNOHANG);
  if (reaped == 0 || (reaped < 0 && errno == EINTR)) return std::nullopt;
  pid_ = -1;
  drain_output();
  if (reaped < 0) return ChildEnd{1, 0};
  if (WIFSIGNALED(status)) return ChildEnd{0, WTERMSIG(status)};
  return ChildEnd{WEXITSTATUS(status), 0};
}

void ChildProcess::turn_log_over() {
  if (log_bytes_ <= kMaxLogBytes) return;
  log_bytes_ = 0;  // where it cannot be done it is tried again that much later
  std::error_code ec;
  std::filesystem::rename(spec_.log_file, spec_.log_file + ".1", ec);
  std::FILE* next = ec ? nullptr : std::fopen(spec_.log_file.c_str(), "ae");
  if (!next) return;
  std::fclose(log_);
  log_ = next;
}

void ChildProcess::drain_output() {
  std::array<char, 8192> buffer{};
  for (int reads = 0; output_ >= 0 && reads < kReadsAtOnce; ++reads) {
    const ssize_t n = ::read(output_, buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n <= 0) {
      ::close(output_);
      output_ = -1;
      break;
    }
    partial_.append(buffer.data(), static_cast<std::size_t>(n));
    for (auto end = partial_.find('\n'); end != std::string::npos; end = partial_.find('\n')) {
      take_line(partial_.substr(0, end));
      partial_.erase(0, end + 1);
    }
    if (partial_.size() > kMaxLineBytes) take_line(std::exchange(partial_, {}));
  }
  if (output_ < 0 && !partial_.empty()) take_line(std::exchange(partial_, {}));
  if (log_) std::fflush(log_);
}

void ChildProcess::take_line(std::string line) {
  if (log_) {
    std::fprintf(log_, "%s\n", line.c_str());
    log_bytes_ += line.size() + 1;
    turn_log_over();
  }
  if (spec_.echo) std::fprintf(stderr, "%s | %s\n", spec_.label.c_str(), line.c_str());
  if (!line.empty()) last_line_ = std::move(line);
}

std::optional<std::string> find_program(const std::string& program) {
  const char* path = std::getenv("PATH");
  std::string_view rest = path ? path : "/usr/local/bin:/usr/bin:/bin";
  while (!rest.empty()) {
    const auto end = std::min(rest.find(':'), rest.size());
    const std::string candidate = std::string(rest.substr(0, end)) + "/" + program;
    rest.remove_prefix(std::min(end + 1, rest.size()));
    struct stat info {};
    if (::stat(candidate.c_str(), &info) == 0 && S_ISREG(info.st_mode) && ::access(candidate.c_str(), X_OK) == 0)
      return candidate;
  }
  return std::nullopt;
}

}  // namespace ditfleet::cli
