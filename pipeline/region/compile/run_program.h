// Runs a program and waits for it, with a deadline.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "shared/core/result.h"

namespace ditfleet::region {

struct ProgramRun {
  int exit_code = 0;
  std::string output;  // stdout and stderr, the first mebibyte
};

// arguments[0] is found along PATH. `input` is a file for stdin, or empty. Blocks until the program has ended; past
// the deadline it and its children are killed: kDeadlineExceeded. kNotFound: there is no such program; kUnavailable: no
// pipe for its output. Writes no file. Thread safe.
Result<ProgramRun> run_program(const std::vector<std::string>& arguments, const std::string& input,
                               std::chrono::seconds deadline);

// A folder of its own below TMPDIR, gone with this object.
class ScratchFolder {
 public:
  ScratchFolder();  // ok() tells whether there is one, why() what was in the way
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  bool ok() const { return !path_.empty(); }
  const std::string& path() const { return path_; }
  const std::string& why() const { return why_; }

 private:
  std::string path_, why_;
};

}  // namespace ditfleet::region
