#include "coordinator/scheduling/service/clock_watch.h"

namespace ditfleet::scheduling {

void ClockWatch::observe(std::int64_t redis_us, std::int64_t sent_us, std::int64_t received_us) {
  redis_us_ = redis_us;
  now_us_ = received_us;
  latest_low_us_ = redis_us - received_us;
  latest_high_us_ = redis_us - sent_us;
  jump_us_ = 0;
  if (known_ && latest_low_us_ > high_us_ + limit_us_) jump_us_ = latest_low_us_ - high_us_;
  if (known_ && latest_high_us_ < low_us_ - limit_us_) jump_us_ = latest_high_us_ - low_us_;
  if (jump_us_ == 0) follow();  // clocks drift apart
}

void ClockWatch::follow() {
  known_ = true;
  low_us_ = latest_low_us_;
  high_us_ = latest_high_us_;
  jump_us_ = 0;
}

ClockWatch::Verdict ClockWatch::judge(std::int64_t seen_us, bool marked) {
  if (held_) {
    const bool back = cause_ == Cause::kMeasured ? jump_us_ == 0 : cause_ == Cause::kBehind && redis_us_ >= behind_us_;
    const bool accepted = marked_ && !marked;
    if (!back && !accepted && now_us_ - since_us_ <= kPatienceUs) return marked_ ? Verdict::kKeep : Verdict::kHold;
    held_ = false;
    follow();
    return Verdict::kRelease;
  }
  const std::int64_t ahead_us = seen_us > 0 ? redis_us_ - seen_us : 0;
  if (seen_us > 0 && !marked && ahead_us >= 0 && ahead_us <= limit_us_) follow();  // another leader took it for right
  if (!marked && jump_us_ == 0 && ahead_us >= -limit_us_) return Verdict::kKeep;
  cause_ = marked ? Cause::kMarked : jump_us_ != 0 ? Cause::kMeasured : Cause::kBehind;
  if (cause_ == Cause::kBehind) jump_us_ = ahead_us;
  behind_us_ = seen_us;
  since_us_ = now_us_;
  held_ = true;
  marked_ = marked;
  return Verdict::kHold;
}

}  // namespace ditfleet::scheduling
