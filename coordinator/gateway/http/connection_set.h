// The open connections. Chooses which connections are closed when there are too many of them or too many unread bytes.
// Slow or idle clients therefore cannot lock out others, and the memory for unread responses is bounded.
//
// Call every function on the server's executor (server.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <utility>

#include "coordinator/gateway/http/connection.h"

namespace ditfleet::gateway {

class ConnectionSet {
 public:
  struct Limits {
    std::size_t connections, connections_per_peer;
    std::uint64_t unread_bytes, arriving_bytes;
  };
  explicit ConnectionSet(Limits limits) : limits_(limits) {}

  // Adds a connection. If its peer or the set has too many, closes another connection that waits for its client. If
  // none does, the new one becomes a guest. There may be as many guests as other connections; then the guest that has
  // waited longest is closed.
  void add(const std::shared_ptr<Connection>& connection);
  // Whether a guest could be added as another connection by now.
  bool has_place_for(const Connection& guest) const;
  void remove(const std::shared_ptr<Connection>& connection) { all_.erase(connection); }
  std::size_t size() const { return all_.size(); }
  const std::set<std::shared_ptr<Connection>>& all() const { return all_; }

  // Whether a response of this size may be buffered until its client has read it. If necessary, closes the slowest of
  // the clients that have been reading for more than 5 s. A single response may have any size.
  bool make_room_for(std::size_t bytes);

  // Counts bytes of a connection, and in the set's total, as long as it exists.
  class Counted {
   public:
    Counted(std::uint64_t& total, std::size_t& own, std::size_t bytes) : total_(total), own_(own) {
      own = bytes;
      total += bytes;
    }
    ~Counted() { total_ -= std::exchange(own_, 0); }
    Counted(const Counted&) = delete;
    Counted& operator=(const Counted&) = delete;

   private:
    std::uint64_t& total_;
    std::size_t& own_;
  };
  // For a response that is being written.
  Counted count_unread(Connection& connection, std::size_t bytes);
  // For a body that is being read. If too many are, closes the connections that wait longest for theirs. A single body
  // may have any size.
  Counted count_arriving(Connection& connection, std::size_t bytes);

 private:
  using Test = std::function<bool(const Connection&)>;
  // Closes and removes the connection that has waited longest for its client: the one with a half-sent request if there
  // is one, else an idle one or an upload that pauses. Only among those that pass, and never `newcomer`. False if all
  // are busy.
  bool evict(const Connection& newcomer, const Test& passes);
  std::size_t count(const Test& passes) const;

  std::set<std::shared_ptr<Connection>> all_;
  Limits limits_;
  std::uint64_t unread_bytes_ = 0, arriving_bytes_ = 0;
};

}  // namespace ditfleet::gateway
