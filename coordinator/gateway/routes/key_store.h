// The keys that administrators add at run time, in Redis: one hash for the whole fleet, with SHA-256s instead of keys.
// Every gateway keeps a copy in its KeyRing and compares the stored version every second. Without Redis, or if Redis
// has lost the keys, the copy stays in use. A file in the data folder remembers that there were keys, so that a gateway
// that restarts after such a loss refuses every caller instead of serving everybody.
//
// Call every function on the connection's executor. None blocks, except that the file is written once.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <memory>
#include <string>

#include "coordinator/gateway/routes/auth.h"
#include "shared/core/deadline.h"

namespace ditfleet::redis {
class Connection;
}

namespace ditfleet::gateway {

namespace asio = boost::asio;

class KeyStore {
 public:
  static constexpr std::size_t kMost = 1000;  // keys in the store

  // `ring` must outlive this object. `folder`: the data folder; empty: there is none.
  KeyStore(std::shared_ptr<redis::Connection> connection, KeyRing& ring, const std::string& folder);

  // Reads the stored keys into the ring if they changed. Errors: those of the connection.
  asio::awaitable<Result<void>> refresh(Deadline deadline);
  asio::awaitable<void> follow();  // refreshes every second until it is canceled

  // Stores a key, or removes the one with its id, then refreshes. kConflict: the keys changed since the last refresh;
  // refresh and check the change again. kUnavailable: the file could not be written, and nothing else requires keys.
  asio::awaitable<Result<void>> put(Key key, Deadline deadline) { return change(std::move(key), true, deadline); }
  asio::awaitable<Result<void>> remove(Key key, Deadline deadline) { return change(std::move(key), false, deadline); }
  // True: Redis has no keys. The ring may still have some that Redis has lost.
  bool empty() const { return version_.empty(); }

 private:
  asio::awaitable<Result<void>> change(Key key, bool keep, Deadline deadline);
  void require_keys();
  Result<void> remember();  // beyond a restart, that keys are required

  std::shared_ptr<redis::Connection> connection_;
  KeyRing& ring_;
  std::string version_;  // of the ring's copy; empty: none is stored
  std::string marker_;   // the file that remembers; empty: there is no data folder
  bool must_remember_;   // nothing else requires keys
  bool remembered_ = false, warned_ = false;
};

}  // namespace ditfleet::gateway
