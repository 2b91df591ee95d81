// The state of a Client and what its calls share.
#pragma once

#include <chrono>
#include <deque>
#include <initializer_list>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "shared/queue/client.h"
#include "shared/queue/keys.h"
#include "shared/redis/connection.h"

namespace ditfleet::queue {

// FCALL ditfleet_v2_<name> <keys>. The caller appends that many keys and then the arguments.
redis::Command fcall(std::string_view name, std::size_t keys);
redis::Command fcall_ro(std::string_view name, std::size_t keys);

class Client::Impl {
 public:
  Impl(std::shared_ptr<redis::Connection> connection, QueueOptions options);
  ~Impl();

  // Calls a Function. If Redis does not have it (a fresh or flushed server), loads the library and calls it again.
  asio::awaitable<Result<redis::Reply>> call(redis::Command command, Deadline deadline);
  asio::awaitable<Result<void>> load(Deadline deadline);
  // XREAD of one stream on the connection `own`, which it creates. Empty: timed out.
  asio::awaitable<Result<std::vector<redis::Reply>>> read_stream(std::shared_ptr<redis::Connection>& own,
                                                                 const std::string& key, const std::string& after,
                                                                 int limit, std::chrono::milliseconds block);
  // Redis' clock in milliseconds. The clock of this host may be hours off.
  asio::awaitable<Result<std::int64_t>> redis_time(Deadline deadline);
  // An estimate of it from the latest redis_time(), never ahead of it; nothing before the first one.
  std::optional<std::int64_t> estimated_time() const;
  // Whether `reap` must leave leases alone because this process has just reconnected.
  bool hold_leases();
  // Forgets jobs whose retention is over. Does nothing within 200 ms of the call before.
  asio::awaitable<void> sweep(Deadline deadline);

  std::shared_ptr<redis::Connection> connection_;
  QueueOptions options_;
  Keys keys_;
  std::shared_ptr<redis::Connection> intake_connection_, mailbox_connection_;

  std::string intake_cursor_ = "0";
  std::unordered_map<std::string, std::string> raw_bodies_;  // entry id → SHA-256 of a raw entry's spec
  std::unordered_map<std::string, int> last_steps_;          // nonce → the last step that Redis accepted
  std::set<std::string> unreadable_workers_;                 // whose records were logged
  std::uint64_t generation_ = 0;
  std::optional<std::int64_t> redis_ahead_us_;  // of the monotonic clock
  Deadline::Clock::time_point hold_until_{}, next_sweep_{};
  std::string sweep_cursor_ = "-inf";
};

// Maximum units per Function call: a longer one would delay other clients.
inline constexpr std::size_t kBatch = 128;

}  // namespace ditfleet::queue
