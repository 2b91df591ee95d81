// What a worker holds and what to do next with it: leases, capacity, stops, drain. It decides; the service
// (service.h) performs and tells what came of it. No socket, no thread, no clock of its own.
//
// A unit's way, with who moves it on:
//   assigned ─take─▶ encoding ─encoded()─▶ prepared ─take─▶ starting ─started()─▶ denoising
//            ─denoised()─▶ finishing (pixel encoding, storing, completing) ─ended()─▶ gone
// One unit at a time is encoding (its text) and one is starting or denoising; any number is finishing.
//
// Leases are counted on the monotonic clock from before a renewal was sent. A unit whose lease has run out
// here has perhaps been given to another worker: it stops at its next step and is not completed, whatever
// Redis may say later.
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

// Why a unit is to stop.
enum class Stop {
  kNone,
  kCanceled,  // asked for: stop at a step, tell the queue
  kRevoked,   // given to another before it started
  kLost,      // the queue says that the attempt is stale
  kLapsed,    // the lease ran out here
  kDrained,   // this worker goes away: hand it back
};

struct Action {
  enum class Kind {
    kEncodeText,      // then encoded(), and failed() right after it if it went wrong
    kStart,           // then started(), start_refused(), or stopped() if it was given up
    kDenoise,         // then denoised(), stopped() or failed()
    kStopDenoising,   // the unit's callback must return false at the next step
    kReportCanceled,  // tell the queue; the unit is gone from here
    kHandBack,        // tell the queue; the unit is gone from here
    kForget,          // the unit is gone from here
  };
  Kind kind;
  queue::Attempt attempt;
  Stop why = Stop::kNone;
};

struct Timing {
  std::chrono::milliseconds lease{5000};
  std::chrono::milliseconds renew{1000};  // between renewals
  std::chrono::milliseconds step{100};    // at least, between renewals made to tell of a step
  std::chrono::milliseconds retry{250};   // after a renewal that failed
};

class Holdings {
 public:
  // `capacity`: units held at once, those that are finishing not counted.
  Holdings(int capacity, Timing timing);

  // --- from the mailbox
  enum class Admitted { kTaken, kDuplicate, kRefused };
  // kRefused: full or draining; hand it back. `waits`: its text is not to be encoded before adapters_there(), and other
  // units pass it.
  Admitted assign(const queue::Attempt& attempt, Clock::time_point now, bool waits = false);
  void revoke(const std::string& nonce);
  void cancel(const std::string& nonce);

  // --- what came of the actions. An unknown nonce (the unit has gone meanwhile) is fine.
  void adapters_there(const std::string& nonce);
  void encoded(const std::string& nonce);
  void started(const std::string& nonce, Clock::time_point sent);
  void start_refused(const std::string& nonce);
  void stepped(const std::string& nonce, int step, int total);
  void denoised(const std::string& nonce);  // all the device had to do is done
  void stopped(const std::string& nonce);   // starting or denoising ended because it was asked to
  void failed(const std::string& nonce);    // at any stage; the unit is gone from here
  void ended(const std::string& nonce);     // completed, or refused

  // --- drain
  void drain();          // hand back what has not started, take nothing new
  void drain_running();  // out of time: stop what denoises and hand it back
  bool draining() const { return draining_; }
  bool empty() const { return units_.empty(); }

  // --- leases
  // What to renew now, in one call; empty: nothing is due. Answer with renewed() or renewal_failed()
  // before it will give any again.
  std::vector<queue::Renewal> due_renewals(Clock::time_point now);
  void renewed(const std::vector<queue::Renewal>& renewals, const std::vector<queue::RenewOutcome>& outcomes,
               Clock::time_point sent);
  void renewal_failed(const std::vector<queue::Renewal>& renewals, Clock::time_point now);
  // The step that has not been told yet, to be told before the unit is completed.
  std::optional<queue::Renewal> take_pending_step(const std::string& nonce);
  // Whether the finishing unit may still be completed.
  bool may_complete(const std::string& nonce, Clock::time_point now) const;
  Clock::time_point lease_until(const std::string& nonce) const;  // min() for an unknown one
  Stop stop_of(const std::string& nonce) const;                   // kLost for an unknown one
  // When due_renewals() or decide() next has something to do, if nothing happens before.
  Clock::time_point next_wakeup() const;

  // Everything to be done now; each action is given once.
  std::vector<Action> decide(Clock::time_point now);

  std::vector<queue::UnitRef> refs() const;
  std::vector<queue::Attempt> attempts() const;

 private:
  struct Unit {
    queue::Attempt attempt;
    Stage stage = Stage::kAssigned;
    Stop stop = Stop::kNone;
    bool waits = false;        // kAssigned: for its adapters
    bool confirmed = false;    // kStarting: the queue has answered
    bool stop_given = false;   // kStopDenoising was
    bool has_stopped = false;  // denoising ended early
    bool step_pending = false;
    int step = 0, total = 0;
    Clock::time_point lease_until;
  };

  Unit* find(const std::string& nonce);
  const Unit* find(const std::string& nonce) const;
  void erase(const std::string& nonce);
  void request_stop(Unit& unit, Stop why);
  static Action settle(const Unit& unit);
  static queue::Renewal renewal_of(Unit& unit);
  bool device_busy() const;

  int capacity_;
  Timing timing_;
  std::vector<Unit> units_;  // in the order they came; a handful
  bool text_busy_ = false, draining_ = false, renewing_ = false;
  Clock::time_point last_renewal_{}, retry_at_{};
};

}  // namespace ditfleet::worker
