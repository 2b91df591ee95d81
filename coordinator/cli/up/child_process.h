// One supervised process: started with its output on a pipe, told to end, reaped, told apart by its label.
#pragma once

#include <sys/types.h>

#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shared/core/result.h"

namespace ditfleet::cli {

struct ChildSpec {
  std::string label;              // "worker-1": the prefix of its lines and the name of its log file
  std::vector<std::string> argv;  // argv[0] is the path of the program
  std::vector<std::string> environment;
  int death_signal = 9;   // what it gets when this process dies; not when the thread ends that started it
  int inherited_fd = -1;  // kept open in the child; -1: none
  std::string log_file;   // every line it prints is appended here
  bool echo = true;       // and, with the label before it, to stderr
};

// How a child ended: its exit status, or the signal.
struct ChildEnd {
  int status = 0;  // of exit(); meaningless if signal is not 0
  int signal = 0;
  bool clean() const { return signal == 0 && status == 0; }
  std::string text() const;  // "exited with status 1", "was killed by signal 9"
};

// Not thread safe; any thread may start it.
class ChildProcess {
 public:
  explicit ChildProcess(ChildSpec spec);
  ~ChildProcess();  // closes the pipe and the log; a child that still runs is left to its death signal
  ChildProcess(ChildProcess&&) noexcept;
  ChildProcess& operator=(ChildProcess&&) = delete;

  // In a process group of its own, so that Ctrl-C reaches the supervisor alone. kUnavailable: no process or
  // file could be made. A program that cannot be executed ends with status 127.
  Result<void> start();
  bool running() const { return pid_ > 0; }
  pid_t pid() const { return pid_; }  // -1 while it does not run
  void send(int signal) const;
  // Its end, once; nothing while it runs.
  std::optional<ChildEnd> reap();

  int output_fd() const { return output_; }  // to poll; -1: none
  // Takes what it has printed. Call it when output_fd() is readable, and once more after its end.
  void drain_output();
  const std::string& last_line() const { return last_line_; }
  const ChildSpec& spec() const { return spec_; }

 private:
  void take_line(std::string line);
  void turn_log_over();  // to FILE.1, once it is 16 MiB
  ChildSpec spec_;
  pid_t pid_ = -1;
  int output_ = -1;
  std::FILE* log_ = nullptr;
  std::size_t log_bytes_ = 0;
  std::string partial_, last_line_;
};

// The full path of `program` from PATH; nothing if it is not there.
std::optional<std::string> find_program(const std::string& program);

}  // namespace ditfleet::cli
