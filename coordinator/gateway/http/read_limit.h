// A limit in time for reads, after which the connection is still there for an answer. The stream's own expires_after()
// closes it.
//
// Threads: those of the server (server.h).
#pragma once

#include <chrono>
#include <memory>

#include "coordinator/gateway/http/connection.h"

namespace ditfleet::gateway {

// From its making to its end; none of the stream's own limits beside it.
class ReadLimit {
 public:
  ReadLimit(std::shared_ptr<Connection> connection, std::chrono::milliseconds limit);
  ~ReadLimit();
  ReadLimit(const ReadLimit&) = delete;
  ReadLimit& operator=(const ReadLimit&) = delete;

  // Whether what failed meanwhile (operation_aborted) failed of it.
  bool passed() const;

 private:
  struct Timer;
  std::shared_ptr<Timer> timer_;  // shared with its handler
};

}  // namespace ditfleet::gateway
