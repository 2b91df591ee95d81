#include "coordinator/scheduling/service/leadership.h"

#include <algorithm>

namespace ditfleet::scheduling {

Leadership::Leadership(std::int64_t ttl_us) : ttl_us_(std::max<std::int64_t>(3, ttl_us)) {}

Leadership::Change Leadership::on_answer(std::int64_t epoch, std::int64_t sent_us, std::int64_t now_us) {
  answered_ = true;
  answered_us_ = now_us;
  next_call_us_ = sent_us + ttl_us_ / 3;
  const bool led = leading();
  if (epoch == 0 || sent_us + ttl_us_ <= now_us) {  // too late: the lease is over
    epoch_ = 0;
    next_call_us_ = sent_us + ttl_us_ / 12;
    return led ? Change::kLost : Change::kNone;
  }
  if (led && epoch != epoch_) {
    epoch_ = 0;
    next_call_us_ = now_us;
    return Change::kLost;
  }
  epoch_ = epoch;
  until_us_ = sent_us + ttl_us_;
  return led ? Change::kNone : Change::kGained;
}

Leadership::Change Leadership::on_fenced(std::int64_t now_us) {
  next_call_us_ = now_us;
  if (!leading()) return Change::kNone;
  epoch_ = 0;
  return Change::kLost;
}

Leadership::Change Leadership::on_tick(std::int64_t now_us) {
  if (!leading() || now_us < until_us_) return Change::kNone;
  epoch_ = 0;
  return Change::kLost;
}

bool Leadership::leader_known(std::int64_t now_us) const {
  return leading() || (answered_ && now_us - answered_us_ < 2 * ttl_us_);
}

}  // namespace ditfleet::scheduling
