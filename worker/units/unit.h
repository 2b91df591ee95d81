// A unit in this process: its assignment, the results of its stages, and a flag with which the io thread stops the
// device thread.
#pragma once

#include <spdlog/spdlog.h>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/engine.h"
#include "shared/core/deadline.h"
#include "shared/core/result.h"
#include "shared/job/spec.h"
#include "shared/media/writer.h"
#include "shared/queue/types.h"
#include "shared/results/store.h"
#include "shared/telemetry/spans.h"
#include "worker/adapters/copies.h"
#include "worker/units/unit_table.h"

namespace ditfleet::worker {

struct Unit {
  // Fixed once assigned.
  queue::MailboxEntry entry;
  job::JobSpec spec;
  pipeline::GenerationRequest request;  // `loras` is set before the text is encoded
  std::vector<AdapterCopyPtr> copies;   // of its adapters, kept as long as it may read them
  std::vector<int> preview_steps;
  pipeline::Model* model = nullptr;
  std::string receipt_of_model;  // empty: none
  int gpus = 1;                  // of this worker
  Clock::time_point received;

  // Passed from stage to stage; only the current stage accesses it.
  std::unique_ptr<pipeline::Generation> prepared;
  std::map<std::string, std::int64_t> phases_us;
  std::vector<std::string> warnings;             // besides those of `prepared`
  std::shared_ptr<media::MediaWriter> writer;    // of the result
  std::int64_t first_step_us = 0, compiled = 0;  // as in results::Manifest

  // The states that its checkpoint may name, the latest last. Used on the io thread.
  std::vector<results::Manifest> checkpoints;
  bool storing = false;             // a checkpoint is being stored
  int next_step = 0;                // of next_state
  std::string next_state;           // the checkpoint to store next; empty: none
  int went_on_from = 0;             // the step of the checkpoint of an earlier attempt
  std::string begun_by;             // receipt_of_model of that attempt, if it differs
  std::atomic<bool> leaves{false};  // it stops to be handed back, with a checkpoint
  std::atomic<bool> pauses{false};  // as leaves; it stores one however little would be lost
  std::atomic<bool> holds{false};   // as pauses, by the job's pause_after_steps

  // Used on the io thread. The span's context does not change and may be read on any thread.
  telemetry::SpanTimer span;
  Clock::time_point denoising_since{};
  int previews_pending = 0;
  bool failed = false;

  std::atomic<bool> stop{false};  // set by the io thread, read by the device thread at each step

  queue::Attempt attempt() const { return {entry.ref, entry.nonce}; }
  std::string label() const;  // for the log: "JOB/0"
  // The unit's span, else what the job's traceparent names.
  telemetry::SpanContext context() const;
  // Logs "unit JOB/0: …" with the ids of trace and span.
  template <class... Values>
  void log(spdlog::level::level_enum level, fmt::format_string<Values...> format, Values&&... values) const {
    if (!spdlog::should_log(level)) return;
    const telemetry::ContextScope scope(context());
    spdlog::log(level, "unit {}: {}", label(), fmt::format(format, std::forward<Values>(values)...));
  }
};

struct ModelSet;

// Creates the unit of an assignment from its admitted spec.
// Errors: kInvalidArgument (the spec is invalid), kNotFound (this worker does not have the model).
Result<std::shared_ptr<Unit>> make_unit(queue::MailboxEntry entry, const ModelSet& models, Clock::time_point now);

}  // namespace ditfleet::worker
