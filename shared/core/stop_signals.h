// The signals that ask a process to end: SIGINT, SIGTERM, and SIGHUP, which its terminal sends when it closes.
#pragma once

#include <csignal>

namespace ditfleet {

// Whether SIGHUP is one of them: not where whoever started the process (nohup) had it ignored, so that it outlives its
// terminal. To be asked before anything handles the signal.
inline bool hangup_ends() {
  struct sigaction action {};
  return ::sigaction(SIGHUP, nullptr, &action) != 0 || action.sa_handler != SIG_IGN;
}

}  // namespace ditfleet
