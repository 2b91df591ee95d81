// Whether this coordinator leads its shard. Redis grants the lease (queue::Client::lead) and fences stale
// leaders by epoch; this decides when to ask, and stops believing in a lease before Redis does.
//
// Pure and not thread safe. Times are microseconds of any monotonic clock.
#pragma once

#include <cstdint>

namespace ditfleet::scheduling {

class Leadership {
 public:
  enum class Change { kNone, kGained, kLost };

  explicit Leadership(std::int64_t ttl_us);

  // The answer to a call sent at `sent_us`: an epoch, or 0 while another leads. A lease counts from before
  // it was asked for, so that it ends here no later than there. Another epoch than before is a loss first:
  // somebody else led in between, and what was known is stale; the next answer gains it.
  Change on_answer(std::int64_t epoch, std::int64_t sent_us, std::int64_t now_us);
  // A transition was refused because of its epoch.
  Change on_fenced(std::int64_t now_us);
  // Time has passed: kLost when the lease ran out without an answer.
  Change on_tick(std::int64_t now_us);

  bool leading() const { return epoch_ != 0; }
  std::int64_t epoch() const { return epoch_; }
  bool leader_known(std::int64_t now_us) const;  // this one, or another within the last two leases
  // When to ask next: thrice a lease while leading; more often while following, to take over soon.
  std::int64_t next_call_us() const { return next_call_us_; }

 private:
  std::int64_t ttl_us_;
  std::int64_t epoch_ = 0;
  std::int64_t until_us_ = 0;
  std::int64_t next_call_us_ = 0;
  std::int64_t answered_us_ = 0;
  bool answered_ = false;
};

}  // namespace ditfleet::scheduling
