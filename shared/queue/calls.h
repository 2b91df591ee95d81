// The implementation of Client: its state, and functions that several calls use.
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

#include "shared/core/log_throttle.h"
#include "shared/queue/client.h"
#include "shared/queue/keys.h"
#include "shared/redis/connection.h"

namespace ditfleet::queue {

// FCALL ditfleet_v3_<name> <keys>. The caller appends the keys and then the arguments.
redis::Command fcall(std::string_view name, std::size_t keys);
redis::Command fcall_ro(std::string_view name, std::size_t keys);

// A row of the Function `list`: the job's open record; o, state, ended, u0 of its hash; the records of its units.
inline constexpr std::size_t kFirstListedUnit = 5;

class Client::Impl {
 public:
  Impl(std::shared_ptr<redis::Connection> connection, QueueOptions options);
  ~Impl();

  // Calls a Function. If Redis does not have the library, or one that refuses the call, loads it and repeats the call.
  // kUnavailable: Redis has a newer version of the library, whose Functions take other arguments.
  asio::awaitable<Result<redis::Reply>> call(redis::Command command, Deadline deadline);
  asio::awaitable<Result<redis::Reply>> call_on(std::shared_ptr<redis::Connection> connection, redis::Command command,
                                                Deadline deadline);
  // Calls a Function and waits until options_.wait_replicas replicas have what it wrote. kUnavailable: they may not.
  asio::awaitable<Result<redis::Reply>> call_with_replicas(redis::Command command, Deadline deadline);
  asio::awaitable<Result<void>> load(Deadline deadline);  // Client::load_library
  // Client::pause and Client::resume.
  asio::awaitable<Result<PauseOutcome>> set_paused(bool paused, std::string job, std::string tenant, Deadline deadline);
  // Calls `job`, whose reply parse_job() reads.
  asio::awaitable<Result<redis::Reply>> read_job(const std::string& id, Deadline deadline);
  // XREAD of one stream on the connection `own`, which it creates if necessary. The result is empty after a timeout.
  // `silence`: so long after `block` without the whole reply, the connection is given up.
  asio::awaitable<Result<std::vector<redis::Reply>>> read_stream(std::shared_ptr<redis::Connection>& own,
                                                                 const std::string& key, const std::string& after,
                                                                 int limit, std::chrono::milliseconds block,
                                                                 std::chrono::milliseconds silence);
  // Redis' clock in milliseconds. This host's clock may differ.
  asio::awaitable<Result<std::int64_t>> redis_time(Deadline deadline);
  // A lower estimate of Redis' clock, computed from the latest redis_time(). Empty before the first redis_time().
  std::optional<std::int64_t> estimated_time() const;
  // How long `reap` leaves leases alone after Redis was away: every worker can reconnect and renew meanwhile.
  std::chrono::milliseconds hold_time() const;
  void hold_leases() { hold_until_ = Deadline::Clock::now() + hold_time(); }
  // Whether `reap` must leave leases alone. `asked`: when the call was sent that has now been answered, or not.
  bool must_hold(Deadline::Clock::time_point asked, bool answered);
  Quota quota(const std::string& tenant) const { return options_.quota ? options_.quota(tenant) : Quota(); }
  // Deletes jobs past their retention. Does nothing within a second of the previous call.
  asio::awaitable<void> sweep(std::int64_t epoch, Deadline deadline);

  std::shared_ptr<redis::Connection> connection_;
  QueueOptions options_;
  Keys keys_;
  std::shared_ptr<redis::Connection> intake_connection_, mailbox_connection_;

  std::string intake_cursor_ = "0";
  std::unordered_map<std::string, std::string> raw_bodies_;  // entry id → SHA-256 of a raw entry's spec
  std::unordered_map<std::string, int> last_steps_;          // nonce → the last step that Redis accepted
  std::set<std::string> unreadable_workers_;                 // workers whose invalid records were logged
  LogThrottle unreadable_mail_;
  std::uint64_t generation_ = 0, reaped_generation_ = 0;
  std::optional<std::int64_t> redis_ahead_us_;  // Redis' clock minus the monotonic clock
  Deadline::Clock::time_point hold_until_{}, next_sweep_{};
  std::string sweep_cursor_ = "-inf";
  std::vector<std::string> too_old_;  // jobs that the next reap() must expire if they are open
};

// The error for a reply "mismatch <id>", "taken" or "quota …" to the job `id` of `units` images and `bytes` of spec.
// Nothing for other replies.
std::optional<Error> refusal_of(const std::string& verdict, const std::string& id, const std::string& tenant,
                                const Quota& quota, std::int64_t units, std::size_t bytes);

// Events of a job that does not end are kept for so long.
inline constexpr std::int64_t kKeepEventsMs = 86'400'000;

// Maximum units, and maximum bytes of specs, per Function call. A longer call would delay other clients.
inline constexpr std::size_t kBatch = 128, kBatchBytes = 1 << 20;

// Where the call that starts with item `begin` ends. `bytes_of` returns the bytes of an item's spec. A call has at
// least one item.
template <class Items, class BytesOf>
std::size_t batch_end(const Items& items, std::size_t begin, BytesOf bytes_of) {
  std::size_t end = begin, bytes = 0;
  while (end < items.size() && end - begin < kBatch) {
    bytes += bytes_of(items[end]);
    if (end > begin && bytes > kBatchBytes) break;
    ++end;
  }
  return end;
}

}  // namespace ditfleet::queue
