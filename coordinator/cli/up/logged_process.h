// A supervised process whose output lines go to a log file and, with its label, to stderr.
#pragma once

#include <cstdio>
#include <optional>
#include <string>

#include "shared/core/child_process.h"

namespace ditfleet::cli {

struct LoggedProcessSpec {
  std::string label;     // "worker-1": the prefix of its lines on stderr
  ProcessSpec program;   // its output goes to the pipe
  std::string log_file;  // every line is appended to it
  bool echo = true;      // also writes lines to stderr
};

// Not thread-safe.
class LoggedProcess {
 public:
  explicit LoggedProcess(LoggedProcessSpec spec) : spec_(std::move(spec)) {}
  ~LoggedProcess();  // does not end a running child; the child ends by its death signal
  LoggedProcess(const LoggedProcess&) = delete;
  LoggedProcess& operator=(const LoggedProcess&) = delete;

  // If the program cannot be executed, the process ends with status 127 and a log line with the reason.
  // Errors: kUnavailable (no process or file can be created).
  Result<void> start();
  bool running() const { return process_.running() || not_executed_; }
  pid_t pid() const { return process_.pid(); }
  void send(int signal) const { process_.send(signal); }
  // How the process ended, once; nothing while it runs.
  std::optional<ProcessEnd> reap();

  int output_fd() const { return process_.output_fd(); }  // to poll; -1: none
  // Reads what the process has printed. Call it when output_fd() is readable.
  void drain_output();
  const std::string& last_line() const { return last_line_; }
  const LoggedProcessSpec& spec() const { return spec_; }

 private:
  void take_line(std::string line);
  void rotate_log();  // to FILE.1, once it exceeds 16 MiB
  LoggedProcessSpec spec_;
  ChildProcess process_;
  bool not_executed_ = false;
  std::FILE* log_ = nullptr;
  std::size_t log_bytes_ = 0;
  std::string partial_, last_line_;
};

}  // namespace ditfleet::cli
