// The signals that stop a process: SIGINT, SIGTERM, and SIGHUP when its terminal closes.
#pragma once

#include <csignal>

namespace ditfleet {

// Whether SIGHUP stops this process: not if it was started with SIGHUP ignored (nohup). Call it before the process
// installs a handler.
inline bool hangup_ends() {
  struct sigaction action {};
  return ::sigaction(SIGHUP, nullptr, &action) != 0 || action.sa_handler != SIG_IGN;
}

}  // namespace ditfleet
