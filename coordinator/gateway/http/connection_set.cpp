#include "coordinator/gateway/http/connection_set.h"

#include <algorithm>
#include <chrono>

namespace ditfleet::gateway {
namespace {

using Clock = std::chrono::steady_clock;

// How long a client may take to read its answer before its connection may be closed in favor of another answer.
constexpr std::chrono::seconds kReadingPatience{5};

}  // namespace

std::size_t ConnectionSet::count(const Test& passes) const {
  return static_cast<std::size_t>(
      std::count_if(all_.begin(), all_.end(), [&](const auto& connection) { return passes(*connection); }));
}

bool ConnectionSet::evict(const Connection& newcomer, const Test& passes) {
  const auto order = [](const Connection& c) { return std::pair(c.idle || c.uploading, *c.waits_since); };
  std::shared_ptr<Connection> first;
  for (const auto& connection : all_) {
    if (!connection->waits_since || connection.get() == &newcomer || !passes(*connection)) continue;
    if (!first || order(*connection) < order(*first)) first = connection;
  }
  if (!first) return false;
  first->waits_since.reset();
  arriving_bytes_ -= std::exchange(first->arriving_bytes, 0);
  first->close();
  all_.erase(first);
  return true;
}

void ConnectionSet::add(const std::shared_ptr<Connection>& connection) {
  Connection& added = *connection;
  all_.insert(connection);
  const Test of_peer = [&](const Connection& c) { return !c.guest && c.peer == added.peer; };
  const Test guest = [](const Connection& c) { return c.guest; };
  const Test served = std::not_fn(guest);
  const bool too_many = !added.from_loopback && count(of_peer) > limits_.connections_per_peer;
  added.guest = (too_many && !evict(added, of_peer)) || (count(served) > limits_.connections && !evict(added, served));
  if (all_.size() > 2 * limits_.connections && !evict(added, guest)) added.close();
}

bool ConnectionSet::has_place_for(const Connection& guest) const {
  return count([](const Connection& c) { return !c.guest; }) < limits_.connections &&
         (guest.from_loopback ||
          count([&](const Connection& c) { return !c.guest && c.peer == guest.peer; }) < limits_.connections_per_peer);
}

bool ConnectionSet::make_room_for(std::size_t bytes) {
  const auto is_slow = [now = Clock::now()](const Connection& c) {
    return c.unread_bytes > 0 && now - c.writes_since > kReadingPatience;
  };
  while (unread_bytes_ > 0 && unread_bytes_ + bytes > limits_.unread_bytes) {
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

ConnectionSet::Counted ConnectionSet::count_arriving(Connection& connection, std::size_t bytes) {
  const Test reads_body = [](const Connection& c) { return c.arriving_bytes > 0; };
  while (arriving_bytes_ > 0 && arriving_bytes_ + bytes > limits_.arriving_bytes && evict(connection, reads_body)) {
  }
  return Counted(arriving_bytes_, connection.arriving_bytes, bytes);
}

ConnectionSet::Counted ConnectionSet::count_unread(Connection& connection, std::size_t bytes) {
  connection.writes_since = Clock::now();
  return Counted(unread_bytes_, connection.unread_bytes, bytes);
}

}  // namespace ditfleet::gateway
