// Tracks whether this coordinator leads its shard. Redis grants the lease (queue::Client::lead) and rejects stale
// leaders by epoch. This class determines when to request the lease, and ends it no later than Redis does.
//
// No I/O, no clock; not thread-safe. Times are microseconds of any monotonic clock.
#pragma once

#include <cstdint>
#include <optional>

namespace ditfleet::scheduling {

class Leadership {
 public:
  enum class Change { kNone, kGained, kLost };

  explicit Leadership(std::int64_t ttl_us);

  // The reply to a call sent at `sent_us`: an epoch, or 0 while another coordinator leads. A lease starts when the call
  // was sent, so it ends here no later than in Redis. A changed epoch returns kLost, because another coordinator led in
  // between and the state is stale. The next reply then returns kGained.
  Change on_answer(std::int64_t epoch, std::int64_t sent_us, std::int64_t now_us);
  // Redis rejected a transition because of its epoch.
  Change on_fenced(std::int64_t now_us);
  // kLost: the lease ended without a reply.
  Change on_tick(std::int64_t now_us);

  bool leading() const { return epoch_ != 0; }
  std::int64_t epoch() const { return epoch_; }
  bool leader_known(std::int64_t now_us) const;  // this coordinator leads, or another did within the last two leases
  // When to request the lease next: three times per lease while leading, more often while another coordinator leads.
  std::int64_t next_call_us() const { return next_call_us_; }

 private:
  Change end();
  std::int64_t ttl_us_;
  std::int64_t epoch_ = 0;
  std::int64_t until_us_ = 0;
  std::int64_t next_call_us_ = 0;
  std::optional<std::int64_t> answered_us_;
};

}  // namespace ditfleet::scheduling
