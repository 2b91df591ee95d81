// The state machine of this worker's units: leases, capacity, stops, drain. It returns actions; the service (service.h)
// performs them and reports their results. No I/O, no threads, no clock.
//
// The stages of a unit, and the calls that advance it:
//   assigned ─decide()─▶ encoding ─encoded()─▶ prepared ─decide()─▶ starting ─started(), decide()─▶ denoising
//            ─denoised()─▶ finishing (image encoding, storing, completing) ─ended()─▶ removed
// At most one unit encodes its text, and at most one is starting or denoising. Any number can be finishing.
//
// A unit goes on while the queue does not answer: no other worker can start it meanwhile, and if one does later, the
// nonce fences this attempt. A unit stops when the queue refuses its renewal, or after Timing::orphan without an
// answer.
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

// Why a unit must stop. If several reasons apply, the last one in this order wins.
enum class StopReason {
  kNone,
  kPaused,    // the job waits until it is resumed; the unit is handed back
  kDrained,   // this worker is draining; the unit is handed back
  kCanceled,  // by the client; reported to the queue
  kOrphaned,  // the queue has not answered for Timing::orphan; handed back once it does
  kRevoked,   // by the scheduler, before the unit started
  kLost,      // the queue reports that the attempt is stale; handed back, because its lease may have lapsed
};

struct Action {
  enum class Kind {
    kEncodeText,      // then call encoded(), and after an error also ended()
    kStart,           // then call started(), start_refused(), or stopped() if the start was abandoned
    kDenoise,         // then call denoised(), stopped() or ended()
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
  std::chrono::milliseconds orphan{600'000};  // how long a unit goes on without an answer
  std::chrono::milliseconds renew{1000};      // between renewals
  std::chrono::milliseconds step{100};        // minimum between renewals that report a step
  std::chrono::milliseconds retry{250};       // after a failed renewal
};

// Not thread-safe.
class UnitTable {
 public:
  // `capacity`: most units at a time, not counting units that are finishing.
  UnitTable(int capacity, Timing timing);

  // --- messages from the mailbox
  enum class Admission { kAccepted, kDuplicate, kRefused };
  // kRefused: the table is full or draining; hand the unit back. With `needs_adapters` the unit's text is not encoded
  // before adapters_ready(), and later units overtake the unit.
  Admission assign(const queue::Attempt& attempt, Clock::time_point now, bool needs_adapters = false);
  void revoke(const std::string& nonce);
  void pause(const std::string& nonce);
  void cancel(const std::string& nonce);

  // --- results of the actions. A nonce that is no longer in the table is ignored.
  void adapters_ready(const std::string& nonce);
  void encoded(const std::string& nonce);
  void started(const std::string& nonce, Clock::time_point now);
  void start_refused(const std::string& nonce);
  void stepped(const std::string& nonce, int step, int total);
  void denoised(const std::string& nonce);  // the device is free again
  void stopped(const std::string& nonce);   // starting or denoising ended on request
  void ended(const std::string& nonce);     // completed, rejected or failed at any stage; removes the unit

  // --- drain
  void drain();          // hands back the units that have not started and refuses new units
  void resume();         // accepts units again
  void drain_running();  // stops and hands back the unit that is denoising
  bool draining() const { return draining_; }
  bool empty() const { return units_.empty(); }

  // --- leases
  // The renewals to send now, in one call; empty if none is due. Returns none until renewed() or renewal_failed() is
  // called.
  std::vector<queue::Renewal> due_renewals(Clock::time_point now);
  void renewed(const std::vector<queue::Renewal>& renewals, const std::vector<queue::RenewOutcome>& outcomes,
               Clock::time_point sent);
  void renewal_failed(const std::vector<queue::Renewal>& renewals, Clock::time_point now);
  // The last step if it has not been reported yet. Send it before the unit is completed.
  std::optional<queue::Renewal> take_pending_step(const std::string& nonce);
  // Whether a finishing unit may still be completed.
  bool may_complete(const std::string& nonce, Clock::time_point now) const;
  StopReason stop_reason(const std::string& nonce) const;  // kLost for an unknown nonce
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
    Clock::time_point orphan_at;  // Timing::orphan after the queue's last answer
  };

  Unit* find(const std::string& nonce);
  const Unit* find(const std::string& nonce) const;
  void request_stop(Unit& unit, StopReason reason);
  static Action final_action(const Unit& unit);
  static queue::Renewal renewal_of(Unit& unit);

  int capacity_;
  Timing timing_;
  std::vector<Unit> units_;  // a handful, in order of arrival
  std::string encoding_;     // nonce of the unit whose text is being encoded, even if the unit was removed
  bool draining_ = false, renewing_ = false;
  Clock::time_point last_renewal_{}, retry_at_{};
};

}  // namespace ditfleet::worker
