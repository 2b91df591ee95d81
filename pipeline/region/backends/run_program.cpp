#include "pipeline/region/backends/run_program.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <thread>

#include "shared/core/bytes.h"

extern char** environ;

namespace ditfleet::region {

ScratchFolder::ScratchFolder() {
  const char* parent = std::getenv("TMPDIR");
  std::string path = std::string(parent && *parent ? parent : "/tmp") + "/ditfleet-region-XXXXXX";
  if (mkdtemp(path.data())) path_ = path;
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  if (ok()) std::filesystem::remove_all(path_, ignored);
}

Result<ProgramRun> run_program(const std::vector<std::string>& arguments, const std::string& input, std::chrono::seconds deadline) {
  ScratchFolder folder;
  if (!folder.ok()) return unavailable("[region] no folder can be made below TMPDIR (or /tmp): " + std::string(std::strerror(errno)));
  const std::string log = folder.path() + "/log";
  std::vector<char*> argv;
  for (const auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, input.empty() ? "/dev/null" : input.c_str(), O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);  // a group of its own: killed with its children
  pid_t child = 0;
  const int failed = posix_spawnp(&child, argv[0], &actions, &attributes, argv.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (failed) return Error{Code::kNotFound, "[region] cannot run " + arguments[0] + ": " + std::strerror(failed)};

  const auto end = std::chrono::steady_clock::now() + deadline;
  int status = 0;
  auto nap = std::chrono::milliseconds(2);
  for (;;) {
    const pid_t done = waitpid(child, &status, WNOHANG);
    if (done == child) break;
    if (done < 0 && errno != EINTR) return internal_error("[region] cannot wait for " + arguments[0] + ": " + std::strerror(errno));
    if (std::chrono::steady_clock::now() > end) {
      kill(-child, SIGKILL);
      waitpid(child, &status, 0);
      return Error{Code::kDeadlineExceeded, "[region] " + arguments[0] + " did not end within " + std::to_string(deadline.count()) + " s"};
    }
    std::this_thread::sleep_for(nap);
    if (nap < std::chrono::milliseconds(20)) nap *= 2;
  }
  auto output = read_file(log);
  return ProgramRun{WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), output ? *output : std::string()};
}

}  // namespace ditfleet::region
