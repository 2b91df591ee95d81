#include "shared/core/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <future>
#include <utility>

#include "shared/core/named_thread.h"
#include "shared/core/text.h"
#include "shared/core/unique_fd.h"

namespace ditfleet {
namespace {

constexpr int kPollMs = 5;

bool make_pipe(UniqueFd& read_end, UniqueFd& write_end) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return false;
  read_end.reset(ends[0]);
  write_end.reset(ends[1]);
  return true;
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (const std::string& text : texts) out.push_back(const_cast<char*>(text.c_str()));
  out.push_back(nullptr);
  return out;
}

// What the child needs, allocated before the fork.
struct Launch {
  std::vector<char*> argv, environment;
  int input = -1, output = -1, inherited = -1;
  int failure = -1;  // takes the errno of an exec that failed; closed by one that succeeds
  int death_signal = 0;
  pid_t parent = 0;
};

// vfork() shares the parent's memory: this function changes none of it and makes async-signal-safe calls only.
[[noreturn]] void execute(const Launch& launch) {
  ::prctl(PR_SET_PDEATHSIG, launch.death_signal);
  if (::getppid() != launch.parent) ::_exit(1);  // the parent died before prctl()
  ::setpgid(0, 0);
  // A handler of the parent must not run in the shared memory.
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction action {};
    if (::sigaction(signal, nullptr, &action) != 0 || action.sa_handler == SIG_IGN) continue;
    action.sa_handler = SIG_DFL;
    action.sa_flags = 0;
    ::sigaction(signal, &action, nullptr);
  }
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::dup2(launch.input, STDIN_FILENO);
  ::dup2(launch.output, STDOUT_FILENO);
  ::dup2(launch.output, STDERR_FILENO);
  if (launch.inherited >= 0) ::fcntl(launch.inherited, F_SETFD, 0);
  ::execvpe(launch.argv[0], launch.argv.data(), launch.environment.data());
  const int error = errno;
  (void)!::write(launch.failure, &error, sizeof error);
  ::_exit(127);
}

// Returns the child's pid or −errno. vfork(): forking a process copies its page tables, which takes long if a model is
// in its memory. Signals are blocked until the child has reset its handlers.
pid_t fork_here(const Launch& launch) {
  sigset_t all, before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  const pid_t pid = ::vfork();
  if (pid == 0) execute(launch);
  const int error = errno;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return pid < 0 ? -error : pid;
}

// The kernel sends the death signal when the thread that forked ends, so that thread must last as long as the process.
pid_t fork_child(const Launch& launch) {
  if (::syscall(SYS_gettid) == ::getpid()) return fork_here(launch);
  static auto& thread = *new NamedThread("fork");  // never destroyed
  std::promise<pid_t> pid;
  asio::post(thread.executor(), [&] { pid.set_value(fork_here(launch)); });
  return pid.get_future().get();
}

ProcessEnd end_of(int status) {
  if (WIFSIGNALED(status)) return {0, WTERMSIG(status)};
  return {WEXITSTATUS(status), 0};
}

}  // namespace

std::string ProcessEnd::text() const {
  if (signal != 0) return "was killed by signal " + std::to_string(signal);
  return "exited with status " + std::to_string(status);
}

Result<ChildProcess> ChildProcess::start(const ProcessSpec& spec) {
  const auto failed = [&](const std::string& what) {
    return unavailable("cannot start " + spec.argv[0] + ": " + what + ": " + std::strerror(errno));
  };
  UniqueFd input(::open(spec.input.c_str(), O_RDONLY | O_CLOEXEC));
  if (!input.valid()) return failed("cannot read '" + spec.input + "'");
  UniqueFd from, to, failure_from, failure_to;
  if (spec.output_file.empty()) {
    if (!make_pipe(from, to)) return failed("no pipe");
    ::fcntl(from.get(), F_SETFL, O_NONBLOCK);
  } else {
    to.reset(::open(spec.output_file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
    if (!to.valid()) return failed("cannot write '" + spec.output_file + "'");
  }
  if (!make_pipe(failure_from, failure_to)) return failed("no pipe");

  Launch launch;
  launch.argv = pointers(spec.argv);
  if (spec.environment) {
    launch.environment = pointers(*spec.environment);
  } else {
    for (char** variable = environ; *variable; ++variable) launch.environment.push_back(*variable);
    launch.environment.push_back(nullptr);
  }
  launch.input = input.get();
  launch.output = to.get();
  launch.inherited = spec.inherited_fd;
  launch.failure = failure_to.get();
  launch.death_signal = spec.death_signal;
  launch.parent = ::getpid();
  ChildProcess child;
  child.pid_ = fork_child(launch);
  if (child.pid_ < 0) {
    errno = -std::exchange(child.pid_, -1);
    return failed("no process");
  }
  failure_to.reset();
  int error = 0;
  ssize_t got = 0;
  while ((got = ::read(failure_from.get(), &error, sizeof error)) < 0 && errno == EINTR) {
  }
  if (got == static_cast<ssize_t>(sizeof error)) {
    (void)child.wait();
    return not_found("cannot execute " + spec.argv[0] + ": " + std::strerror(error));
  }
  child.output_ = std::move(from);
  return child;
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), output_(std::move(other.output_)) {}

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(output_, other.output_);
  return *this;
}

void ChildProcess::send(int signal) const {
  if (pid_ > 0) ::kill(pid_, signal);
}

void ChildProcess::send_to_group(int signal) const {
  if (pid_ > 0) ::kill(-pid_, signal);
}

std::optional<ProcessEnd> ChildProcess::reap() {
  if (pid_ <= 0) return std::nullopt;
  int status = 0;
  const pid_t reaped = ::waitpid(pid_, &status, WNOHANG);
  if (reaped == 0 || (reaped < 0 && errno == EINTR)) return std::nullopt;
  pid_ = -1;
  return reaped < 0 ? ProcessEnd{1, 0} : end_of(status);
}

ProcessEnd ChildProcess::wait() {
  int status = 0;
  pid_t reaped = -1;
  while ((reaped = ::waitpid(pid_, &status, 0)) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  return reaped < 0 ? ProcessEnd{1, 0} : end_of(status);
}

Result<ProgramRun> run_program(const ProcessSpec& spec, Deadline deadline) {
  auto child = ChildProcess::start(spec);
  if (!child) return child.error();
  ProgramRun run;
  std::optional<ProcessEnd> end;
  for (;;) {
    if (!end) end = child->reap();
    pollfd reads{child->output_fd(), POLLIN, 0};  // poll() ignores an fd of -1
    if (::poll(&reads, 1, end ? 0 : kPollMs) > 0) {
      char bytes[16384];
      const ssize_t n = ::read(reads.fd, bytes, sizeof bytes);
      if (n > 0) run.output.append(bytes, std::min(static_cast<std::size_t>(n), kMaxProgramOutput - run.output.size()));
      if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) child->close_output();
    } else if (end) {
      break;
    }
    if (!deadline.passed()) continue;
    if (end) break;  // a child of the program still writes
    child->send_to_group(SIGKILL);
    (void)child->wait();
    return Error{Code::kDeadlineExceeded, spec.argv[0] + " did not end in time"};
  }
  run.exit_code = end->signal != 0 ? 128 + end->signal : end->status;
  return run;
}

std::optional<std::string> find_program(const std::string& program) {
  const char* path = std::getenv("PATH");
  for (const std::string_view folder : split(path ? path : "/usr/local/bin:/usr/bin:/bin", ':')) {
    const std::string candidate = std::string(folder) + "/" + program;
    struct stat info {};
    if (::stat(candidate.c_str(), &info) == 0 && S_ISREG(info.st_mode) && ::access(candidate.c_str(), X_OK) == 0)
      return candidate;
  }
  return std::nullopt;
}

}  // namespace ditfleet
