#include "coordinator/gateway/http/connection_set.h"

#include <chrono>

namespace ditfleet::gateway {
namespace {

using Clock = std::chrono::steady_clock;

// How long a client may take to read its answer before its connection may be closed in favor of another answer.
constexpr std::chrono::seconds kReadingPatience{5};

}  // namespace

void ConnectionSet::evict_longest_idle(const Connection& newcomer) {
  std::shared_ptr<Connection> longest;
  for (const auto& connection : all_) {
    if (!connection->awaits_head_since || connection.get() == &newcomer) continue;
    if (!longest || *connection->awaits_head_since < *longest->awaits_head_since) longest = connection;
  }
  if (!longest) return;
  longest->awaits_head_since.reset();
  longest->close();
  all_.erase(longest);
}

bool ConnectionSet::make_room_for(std::size_t bytes) {
  const auto is_slow = [now = Clock::now()](const Connection& c) {
    return c.unread_bytes > 0 && now - c.writes_since > kReadingPatience;
  };
  while (unread_bytes_ > 0 && unread_bytes_ + bytes > max_unread_bytes_) {
    std::shared_ptr<Connection> slowest;
    for (const auto& connection : all_) {
      if (is_slow(*connection) && (!slowest || connection->writes_since < slowest->writes_since)) slowest = connection;
    }
    if (!slowest) return false;
    unread_bytes_ -= std::exchange(slowest->unread_bytes, 0);
    slowest->close();
  }
  return true;
}

ConnectionSet::Unread::Unread(ConnectionSet& set, Connection& connection, std::size_t bytes)
    : set_(set), connection_(connection) {
  connection_.unread_bytes = bytes;
  connection_.writes_since = Clock::now();
  set_.unread_bytes_ += bytes;
}

ConnectionSet::Unread::~Unread() { set_.unread_bytes_ -= std::exchange(connection_.unread_bytes, 0); }

}  // namespace ditfleet::gateway
