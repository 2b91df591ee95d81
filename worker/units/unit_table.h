// The units that this worker holds, and what to do next with each: leases, capacity, stops, drain. It decides; the
// service (service.h) performs the actions and reports their results. No I/O, no threads, no clock.
//
// The stages of a unit, and the calls that move it on:
//   assigned ─decide()─▶ encoding ─encoded()─▶ prepared ─decide()─▶ starting ─started(), decide()─▶ denoising
//            ─denoised()─▶ finishing (image encoding, storing, completing) ─ended()─▶ removed
// At most one unit is encoding its text, and at most one is starting or denoising. Any number may be finishing.
//
// A lease counts on the monotonic clock from before its renewal was sent. Once it has lapsed here, the unit may have
// been given to another worker. The unit then stops at its next step and is not completed, whatever Redis says later.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shared/queue/types.h"

namespace ditfleet::worker {

using Clock = std::chrono::steady_clock;

enum class Stage { kAssigned, kEncoding, kPrepared, kStarting, kDenoising, kFinishing };

// Why a unit must stop. With several reasons the last in this order wins: it leaves the least to report to the queue.
enum class StopReason {
  kNone,
  kDrained,   // this worker is shutting down; the unit is handed back
  kCanceled,  // by the client; reported to the queue
  kLapsed,    // the lease ran out here
  kRevoked,   // by the scheduler, before the unit started
  kLost,      // the queue says that the attempt is stale
};

struct Action {
  enum class Kind {
    kEncodeText,      // answer with encoded(), followed by ended() after an error
    kStart,           // answer with started(), start_refused(), or stopped() if it was given up
    kDenoise,         // answer with denoised(), stopped() or ended()
    kStopDenoising,   // the unit's step callback must return false
    kReportCanceled,  // the unit is removed from the table
    kHandBack,        // the unit is removed from the table
    kForget,          // the unit is removed from the table; nothing to report
  };
  Kind kind;
  queue::Attempt attempt;
  StopReason reason = StopReason::kNone;
};

struct Timing {
  std::chrono::milliseconds lease{5000};
  std::chrono::milliseconds renew{1000};  // between renewals
  std::chrono::milliseconds step{100};    // at least, between renewals that report a step
  std::chrono::milliseconds retry{250};   // after a failed renewal
};

// Not thread-safe.
class UnitTable {
 public:
  // `capacity`: units held at once, without those that are finishing.
  UnitTable(int capacity, Timing timing);

  // --- messages from the mailbox
  enum class Admission { kAccepted, kDuplicate, kRefused };
  // kRefused: full or draining; hand the unit back. With `needs_adapters` its text is not encoded before
  // adapters_ready(), and later units overtake it.
  Admission assign(const queue::Attempt& attempt, Clock::time_point now, bool needs_adapters = false);
  void revoke(const std::string& nonce);
  void cancel(const std::string& nonce);

  // --- results of the actions. A nonce that is no longer in the table is ignored.
  void adapters_ready(const std::string& nonce);
  void encoded(const std::string& nonce);
  void started(const std::string& nonce, Clock::time_point sent);
  void start_refused(const std::string& nonce);
  void stepped(const std::string& nonce, int step, int total);
  void denoised(const std::string& nonce);  // the device is free again
  void stopped(const std::string& nonce);   // starting or denoising ended on request
  void ended(const std::string& nonce);     // completed, refused or failed at any stage; removes the unit

  // --- drain
  void drain();          // hands back what has not started and refuses new units
  void drain_running();  // stops and hands back what is denoising
  bool draining() const { return draining_; }
  bool empty() const { return units_.empty(); }

  // --- leases
  // The renewals to send now, in one call; empty if none is due. Returns no more until renewed() or renewal_failed().
  std::vector<queue::Renewal> due_renewals(Clock::time_point now);
  void renewed(const std::vector<queue::Renewal>& renewals, const std::vector<queue::RenewOutcome>& outcomes,
               Clock::time_point sent);
  void renewal_failed(const std::vector<queue::Renewal>& renewals, Clock::time_point now);
  // The last step if it has not been reported yet; to be sent before the unit is completed.
  std::optional<queue::Renewal> take_pending_step(const std::string& nonce);
  // Whether a finishing unit may still be completed.
  bool may_complete(const std::string& nonce, Clock::time_point now) const;
  Clock::time_point lease_until(const std::string& nonce) const;  // min() for an unknown nonce
  StopReason stop_reason(const std::string& nonce) const;         // kLost for an unknown nonce
  // When to call due_renewals() and decide() again if nothing else happens; max(): never.
  Clock::time_point next_wakeup() const;

  // The actions that are due. Each is returned once.
  std::vector<Action> decide(Clock::time_point now);

  std::vector<queue::UnitRef> refs() const;
  std::vector<queue::Attempt> attempts() const;

 private:
  struct Unit {
    queue::Attempt attempt;
    Stage stage = Stage::kAssigned;
    StopReason stop = StopReason::kNone;
    bool needs_adapters = false;
    bool confirmed = false;       // kStarting: the queue has accepted the start
    bool stop_requested = false;  // kStopDenoising was returned
    bool has_stopped = false;
    bool step_pending = false;
    int step = 0, total = 0;
    Clock::time_point lease_until;
  };

  Unit* find(const std::string& nonce);
  const Unit* find(const std::string& nonce) const;
  void request_stop(Unit& unit, StopReason reason);
  static Action final_action(const Unit& unit);
  static queue::Renewal renewal_of(Unit& unit);

  int capacity_;
  Timing timing_;
  std::vector<Unit> units_;  // a handful, in order of arrival
  bool text_busy_ = false, draining_ = false, renewing_ = false;
  Clock::time_point last_renewal_{}, retry_at_{};
};

}  // namespace ditfleet::worker
