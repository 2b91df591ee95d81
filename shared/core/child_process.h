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
  std::vector<std::string> argv;                        // argv[0] is a path, or a name to find in PATH
  std::optional<std::vector<std::string>> environment;  // "NAME=VALUE" strings; unset: this process's
  std::string input = "/dev/null";                      // the file to use as stdin
  // stdout and stderr are appended to this file. If it is empty, both go to the pipe output_fd().
  std::string output_file;
  int death_signal = SIGKILL;  // sent to the child when this process dies
  int inherited_fd = -1;       // a descriptor that stays open in the child; -1: none
};

struct ProcessEnd {
  int status = 0;            // of exit(); meaningless unless `signal` is 0
  int signal = 0;            // the signal that killed the process
  std::string text() const;  // "exited with status 1", "was killed by signal 9"
};

// A child process in a separate process group, with no signals blocked. Not thread-safe. Any thread may start a child;
// the end of that thread does not send the death signal.
class ChildProcess {
 public:
  // Returns once the program has been executed.
  // Errors: kNotFound (argv[0] cannot be executed), kUnavailable (no process, pipe or file can be created).
  static Result<ChildProcess> start(const ProcessSpec& spec);

  ChildProcess() = default;   // no process
  ~ChildProcess() = default;  // closes the pipe and leaves a running child alone
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;

  // True from start() until reap() or wait() has returned the process's end.
  bool running() const { return pid_ > 0; }
  pid_t pid() const { return pid_; }               // -1 unless running()
  int output_fd() const { return output_.get(); }  // the read end of the pipe, non-blocking; -1: closed or none
  void close_output() { output_.reset(); }

  void send(int signal) const;           // sends to the process
  void send_to_group(int signal) const;  // sends to the process and its children
  // Returns how the process ended, or nothing while it runs. Returns the end only once. Does not block.
  std::optional<ProcessEnd> reap();
  // Waits until the process ends and returns how. Requires running().
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

// Runs a program and waits until it ends, but not until its children end. Kills the process group at the deadline.
// Errors: those of ChildProcess::start(); kDeadlineExceeded. Thread-safe. Blocks.
Result<ProgramRun> run_program(const ProcessSpec& spec, Deadline deadline);

// The full path of `program` in PATH; nothing if PATH has no such program.
std::optional<std::string> find_program(const std::string& program);

}  // namespace ditfleet
