// The signals that stop a process: SIGINT, SIGTERM, and SIGHUP when its terminal closes.
#pragma once

#include <csignal>

namespace ditfleet {

// Returns whether SIGHUP stops this process. It does not if SIGHUP was ignored at the start (nohup). Call this before
// installing a signal handler.
inline bool hangup_ends() {
  struct sigaction action {};
  return ::sigaction(SIGHUP, nullptr, &action) != 0 || action.sa_handler != SIG_IGN;
}

}  // namespace ditfleet
