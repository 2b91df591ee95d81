#include "coordinator/scheduling/service/leadership.h"

#include <algorithm>
#include <utility>

namespace ditfleet::scheduling {

Leadership::Leadership(std::int64_t ttl_us) : ttl_us_(std::max<std::int64_t>(3, ttl_us)) {}

Leadership::Change Leadership::on_answer(std::int64_t epoch, std::int64_t sent_us, std::int64_t now_us) {
  answered_us_ = now_us;
  next_call_us_ = sent_us + ttl_us_ / 3;
  if (epoch == 0 || sent_us + ttl_us_ <= now_us) {  // too late: the lease is over
    next_call_us_ = sent_us + ttl_us_ / 12;
    return end();
  }
  if (leading() && epoch != epoch_) return on_fenced(now_us);
  until_us_ = sent_us + ttl_us_;
  return std::exchange(epoch_, epoch) != 0 ? Change::kNone : Change::kGained;
}

Leadership::Change Leadership::on_fenced(std::int64_t now_us) {
  next_call_us_ = now_us;
  return end();
}

Leadership::Change Leadership::on_tick(std::int64_t now_us) { return now_us < until_us_ ? Change::kNone : end(); }

Leadership::Change Leadership::end() { return std::exchange(epoch_, 0) != 0 ? Change::kLost : Change::kNone; }

bool Leadership::leader_known(std::int64_t now_us) const {
  return leading() || (answered_us_ && now_us - *answered_us_ < 2 * ttl_us_);
}

}  // namespace ditfleet::scheduling
