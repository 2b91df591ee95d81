// fork() for children that are to end with this process (PR_SET_PDEATHSIG).
#pragma once

#include <sys/types.h>

#include <functional>

namespace ditfleet {

// The kernel sends the parent-death signal when the *thread* that forked ends, whatever becomes of its process. So the
// fork is made by a thread that lasts: the main one, if that is the caller, else one that is kept for it until the
// process ends.
//
// `child` is run in the child and must not return; between fork and exec it may make async-signal-safe calls alone. It
// may find all signals blocked. Returns the child's pid, or −errno. Thread safe; blocks for as long as a fork takes.
pid_t fork_child(const std::function<void()>& child);

}  // namespace ditfleet
