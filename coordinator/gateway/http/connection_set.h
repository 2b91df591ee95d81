// The open connections, and which of them go where there is no room for all: so that clients that ask nothing, ask
// slowly or read slowly shut out nobody, and what waits for them to read is bounded.
//
// Threads: those of the server (server.h).
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

  // Closes and removes the one that has shown no whole head for longest, in favour of `newcomer`. If all are at work
  // none.
  void make_room(const Connection& newcomer);

  // Whether an answer of this size may be held until its client has read it. To that end those are closed that have
  // read at theirs for longest, and for a while already. One alone may be of any size.
  bool make_room_for(std::size_t bytes);

  // Counts an answer's bytes for as long as it is being written.
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
