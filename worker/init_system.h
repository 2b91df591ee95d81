// Reports the state of this process to systemd (sd_notify(3)).
#pragma once

#include <string_view>

namespace ditfleet::worker {

// Sends "READY=1" and the like to NOTIFY_SOCKET. Does nothing without it.
void notify_init_system(std::string_view state);

}  // namespace ditfleet::worker
