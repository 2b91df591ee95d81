// The open connections. Chooses which connections are closed when there are too many of them or too many unread bytes.
// Slow or idle clients therefore cannot lock out others, and the memory for unread responses is bounded.
//
// Call every function on the server's executor (server.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <utility>

#include "coordinator/gateway/http/connection.h"

namespace ditfleet::gateway {

class ConnectionSet {
 public:
  explicit ConnectionSet(std::uint64_t max_unread_bytes) : max_unread_bytes_(max_unread_bytes) {}

  void add(std::shared_ptr<Connection> connection) { all_.insert(std::move(connection)); }
  void remove(const std::shared_ptr<Connection>& connection) { all_.erase(connection); }
  std::size_t size() const { return all_.size(); }
  const std::set<std::shared_ptr<Connection>>& all() const { return all_; }

  // Closes and removes the connection that has waited longest for a complete request head, but not `newcomer`. Does
  // nothing if all connections are busy.
  void evict_longest_idle(const Connection& newcomer);

  // Whether a response of this size may be buffered until its client has read it. If necessary, closes the slowest of
  // the clients that have been reading for more than 5 s. A single response may have any size.
  bool make_room_for(std::size_t bytes);

  // Counts a response's bytes while it is being written.
  class Unread {
   public:
    Unread(ConnectionSet& set, Connection& connection, std::size_t bytes);
    ~Unread();
    Unread(const Unread&) = delete;
    Unread& operator=(const Unread&) = delete;

   private:
    ConnectionSet& set_;
    Connection& connection_;
  };

 private:
  std::set<std::shared_ptr<Connection>> all_;
  std::uint64_t max_unread_bytes_, unread_bytes_ = 0;
};

}  // namespace ditfleet::gateway
