#include "pipeline/region/compile/run_program.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <thread>

extern char** environ;

namespace ditfleet::region {
namespace {

constexpr std::size_t kMostOutput = 1 << 20;  // bytes that are kept; what follows is read and forgotten
constexpr std::chrono::milliseconds kFirstNap{2}, kLastNap{20};

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { close(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
};

// Ours, but for what changes a program's words: its language, and the width that GCC breaks lines at. Keys are made of
// them.
std::vector<std::string> environment() {
  std::vector<std::string> made{"LC_ALL=C"};
  for (char** one = environ; *one; ++one) {
    const std::string_view variable(*one);
    if (!variable.starts_with("LC_ALL=") && !variable.starts_with("LANGUAGE=") && !variable.starts_with("COLUMNS="))
      made.emplace_back(variable);
  }
  return made;
}

// One read, which poll() has announced. False once nobody can write any more.
bool take(int fd, std::string& output) {
  char bytes[16384];
  const ssize_t n = ::read(fd, bytes, sizeof bytes);
  if (n > 0) output.append(bytes, std::min(static_cast<std::size_t>(n), kMostOutput - output.size()));
  return n > 0 || (n < 0 && errno == EINTR);
}

}  // namespace

ScratchFolder::ScratchFolder() {
  const char* parent = std::getenv("TMPDIR");
  std::string path = std::string(parent && *parent ? parent : "/tmp") + "/ditfleet-region-XXXXXX";
  if (mkdtemp(path.data()))
    path_ = path;
  else
    why_ = "no folder can be made in " + path.substr(0, path.rfind('/')) + ": " + std::strerror(errno);
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  if (ok()) std::filesystem::remove_all(path_, ignored);
}

Result<ProgramRun> run_program(const std::vector<std::string>& arguments, const std::string& input,
                               std::chrono::seconds deadline) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0)
    return unavailable("[region] no pipe can be made for " + arguments[0] + ": " + std::strerror(errno));
  const Descriptor from(ends[0]);
  Descriptor to(ends[1]);
  std::vector<char*> argv;
  for (const auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);

  auto variables = environment();
  std::vector<char*> envp;
  for (auto& variable : variables) envp.push_back(variable.data());
  envp.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, input.empty() ? "/dev/null" : input.c_str(), O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, to.get(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);  // a group of its own: killed with its children
  pid_t child = 0;
  const int failed = posix_spawnp(&child, argv[0], &actions, &attributes, argv.data(), envp.data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (failed) return Error{Code::kNotFound, "[region] cannot run " + arguments[0] + ": " + std::strerror(failed)};
  to.close();

  // Until the program has ended and what it wrote is read. Children of its own may hold the pipe longer: they are not
  // waited for.
  const auto end = std::chrono::steady_clock::now() + deadline;
  std::string output;
  int status = 0;
  auto nap = kFirstNap;
  for (bool ended = false, open = true;;) {
    if (!ended) {
      const pid_t done = waitpid(child, &status, WNOHANG);
      if (done < 0 && errno != EINTR)
        return internal_error("[region] cannot wait for " + arguments[0] + ": " + std::strerror(errno));
      ended = done == child;
    }
    bool wrote = false;
    if (open) {
      pollfd reads{from.get(), POLLIN, 0};
      wrote = poll(&reads, 1, ended ? 0 : static_cast<int>(nap.count())) > 0;
      if (wrote && !(open = take(from.get(), output))) nap = kFirstNap;  // it is about to end
    } else if (!ended) {
      std::this_thread::sleep_for(nap);
    }
    if (ended && !(open && wrote)) break;
    if (std::chrono::steady_clock::now() > end) {
      if (ended) break;
      kill(-child, SIGKILL);
      waitpid(child, &status, 0);
      return Error{Code::kDeadlineExceeded,
                   "[region] " + arguments[0] + " did not end within " + std::to_string(deadline.count()) + " s"};
    }
    if (!wrote && nap < kLastNap) nap *= 2;
  }
  return ProgramRun{WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), std::move(output)};
}

}  // namespace ditfleet::region
