// How the client calls: Function calls as commands, the blocking connections, and what it remembers.
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

// FCALL ditfleet_v1_<name> <keys>, ready for that many keys and then the arguments.
redis::Command fcall(std::string_view name, std::size_t keys);
redis::Command fcall_ro(std::string_view name, std::size_t keys);

// An admission that found its entry to be none of an open job: to be told, or, if the job has just ended, to be
// dropped.
Rejection stray(const Admission& a);

class Client::Impl {
 public:
  Impl(std::shared_ptr<redis::Connection> connection, QueueOptions options);
  ~Impl();

  // Runs a Function; if Redis does not know it (a fresh or flushed server), loads the library and tries
  // once more.
  asio::awaitable<Result<redis::Reply>> call(redis::Command command, Deadline deadline);
  asio::awaitable<Result<void>> load(Deadline deadline);
  // XREAD of one stream on a connection of its own. Empty: the time-out.
  asio::awaitable<Result<std::vector<redis::Reply>>> read_stream(std::shared_ptr<redis::Connection>& own,
                                                                 const std::string& key, const std::string& after,
                                                                 int limit, std::chrono::milliseconds block);
  // Redis' clock in milliseconds, asked for now. Nobody else's counts here: a host's own may be hours off.
  asio::awaitable<Result<std::int64_t>> redis_time(Deadline deadline);
  // The same as of when it was last asked for, never ahead of it; nothing: it never was.
  std::optional<std::int64_t> reckoned_time() const;
  // What was read as one entry of several jobs leaves the intake when all of them have been seen to.
  void expect(const std::vector<IntakeEntry>& jobs_of_entry);
  void seen_to(std::span<const std::string_view> entry_ids, Deadline deadline);  // does not wait
  // True while leases must be left alone because this process has just come back to Redis.
  bool hold_leases();
  // Forgets jobs that ended longer ago than the retention; every 200 ms at most.
  asio::awaitable<void> sweep(Deadline deadline);

  std::shared_ptr<redis::Connection> connection_;
  QueueOptions options_;
  Keys keys_;
  std::shared_ptr<redis::Connection> intake_connection_, mailbox_connection_;

  std::string intake_cursor_ = "0";
  std::unordered_map<std::string, std::string> raw_bodies_;  // entry id → SHA-256 of a raw entry's spec
  std::unordered_map<std::string, std::set<std::string, std::less<>>>
      shared_entries_;                               // → entry_ids still to be seen to
  std::size_t jobs_an_entry_ = 1;                    // of late: a read is limited in jobs
  std::unordered_map<std::string, int> last_steps_;  // nonce → the last step that Redis took
  std::set<std::string> unreadable_workers_;         // that it was told of
  std::uint64_t generation_ = 0;
  std::optional<std::int64_t> redis_ahead_us_;  // of the monotonic clock
  Deadline::Clock::time_point hold_until_{}, next_sweep_{};
  std::string sweep_cursor_ = "-inf";
};

// Most units a Function call takes: long enough to be cheap, short enough not to keep others waiting.
inline constexpr std::size_t kBatch = 128;

}  // namespace ditfleet::queue
