// One unit in this process: what was assigned, what the stages have made of it, and the two words by which
// the io thread tells the device thread to stop.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "pipeline/engine.h"
#include "shared/core/result.h"
#include "shared/job/spec.h"
#include "shared/queue/types.h"
#include "shared/telemetry/spans.h"
#include "worker/adapters/copies.h"
#include "worker/units/unit_table.h"

namespace ditfleet::worker {

struct Unit {
  // Fixed once assigned.
  queue::MailboxEntry entry;
  job::JobSpec spec;
  pipeline::GenerationRequest request;  // its adapters are there before its text is encoded
  std::vector<AdapterCopyPtr> copies;   // that it may read
  std::vector<int> preview_steps;
  pipeline::Model* model = nullptr;
  Clock::time_point received;

  // Handed from stage to stage; only the stage that has the unit touches it.
  std::unique_ptr<pipeline::Generation> prepared;
  std::map<std::string, std::int64_t> phases_us;

  // The io thread's; its context does not change and is any thread's.
  telemetry::SpanTimer span;
  Clock::time_point denoising_since{};
  int previews_pending = 0;

  // Written by the io thread, read by the device thread at each step. The device thread looks at the clock
  // itself: after this process was stopped and continued it may be the first to run.
  std::atomic<bool> stop{false};
  std::atomic<Clock::rep> lease_until{Clock::time_point::max().time_since_epoch().count()};

  queue::Attempt attempt() const { return {entry.ref, entry.nonce}; }
  bool must_stop() const { return stop || Clock::now().time_since_epoch().count() >= lease_until; }
  // For the log: "JOB/0", and the id of the job's trace where it has one.
  std::string label() const;
};

struct ModelSet;

// The unit that a mailbox entry assigns, with the spec as it was admitted.
// kInvalidArgument: the spec is bad and stays bad. kNotFound: this worker does not hold the model.
Result<std::shared_ptr<Unit>> make_unit(queue::MailboxEntry entry, const ModelSet& models, Clock::time_point now);

}  // namespace ditfleet::worker
