// Starts programs as child processes that end with this process.
#pragma once

#include <sys/types.h>

#include <csignal>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "shared/core/deadline.h"
#include "shared/core/result.h"
#include "shared/core/unique_fd.h"

namespace ditfleet {

struct ProcessSpec {
  std::vector<std::string> argv;                        // argv[0]: a path, or a name to find in PATH
  std::optional<std::vector<std::string>> environment;  // NAME=VALUE each; unset: this process's
  std::string input = "/dev/null";                      // the file that becomes stdin
  // stdout and stderr are appended to this file. Empty: they go to one pipe, see output_fd().
  std::string output_file;
  int death_signal = SIGKILL;  // what the child receives when this process dies
  int inherited_fd = -1;       // stays open in the child; -1: none
};

struct ProcessEnd {
  int status = 0;  // of exit(); meaningless unless `signal` is 0
  int signal = 0;  // the signal that killed the process
  bool clean() const { return signal == 0 && status == 0; }
  std::string text() const;  // "exited with status 1", "was killed by signal 9"
};

// One child process, in a process group of its own, with no signal blocked. Not thread-safe. A child may be started
// from any thread; it does not receive its death signal when that thread ends.
class ChildProcess {
 public:
  // Returns once the program has been executed.
  // Errors: kNotFound (argv[0] cannot be executed), kUnavailable (no process, pipe or file can be created).
  static Result<ChildProcess> start(const ProcessSpec& spec);

  ChildProcess() = default;   // no process
  ~ChildProcess() = default;  // closes the pipe and leaves a running child alone
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;

  // True from start() until reap() or wait() has returned the end.
  bool running() const { return pid_ > 0; }
  pid_t pid() const { return pid_; }               // -1 unless running()
  int output_fd() const { return output_.get(); }  // the pipe's end to read, non-blocking; -1: closed or none
  void close_output() { output_.reset(); }

  void send(int signal) const;           // to the process
  void send_to_group(int signal) const;  // to the process and its children
  // How the process ended, once; nothing while it runs. Does not block.
  std::optional<ProcessEnd> reap();
  // The same, after waiting for the end. Requires running().
  ProcessEnd wait();

 private:
  pid_t pid_ = -1;
  UniqueFd output_;
};

struct ProgramRun {
  int exit_code = 0;   // 128 + the signal's number if a signal killed the program
  std::string output;  // the first kMaxProgramOutput bytes of stdout and stderr
};
inline constexpr std::size_t kMaxProgramOutput = 1 << 20;

// Runs a program and waits for its end, not for its children's. Past the deadline it kills the process group.
// Errors: those of ChildProcess::start(); kDeadlineExceeded. Thread-safe. Blocks.
Result<ProgramRun> run_program(const ProcessSpec& spec, Deadline deadline);

// The full path of `program` in PATH; nothing if PATH has no such program.
std::optional<std::string> find_program(const std::string& program);

}  // namespace ditfleet
