// One file for the whole life of a unit: each action is a coroutine, and the next begins where it ends.
#include "worker/units/unit_runner.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <cmath>
#include <utility>

#include "shared/telemetry/metrics.h"
#include "worker/models/model_timings.h"
#include "worker/models/request.h"
#include "worker/units/receipt.h"
#include "worker/units/unit_spans.h"

namespace ditfleet::worker {
namespace {

using namespace std::chrono_literals;

constexpr auto kCallTimeout = 2s;    // per queue call
constexpr auto kStoreTimeout = 30s;  // per attempt to store a result
constexpr auto kStoreLimit = 10s;    // for all attempts on one worker; a full disk usually stays full
constexpr auto kStored = 10s;        // as long as a checkpoint takes to be stored, at most
constexpr auto kStoredInTime = 1s;   // while the lease of its unit runs on
constexpr auto kPause = 200ms;       // between attempts
constexpr auto kMaxPause = 5s;       // between attempts to hand a unit back
constexpr std::size_t kMaxWarmClasses = 64;

std::int64_t us_since(Clock::time_point then) {
  return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - then).count();
}

results::ResultKey result_key_of(const Unit& unit) {
  return {unit.entry.ref.job, unit.entry.ref.unit, unit.entry.nonce, unit.entry.tenant};
}

// Not inside the coroutine: GCC 12 frees an initializer list there too early.
std::map<std::string, std::string> preview_fields(const Unit& unit, const std::string& key, int index, int step,
                                                  const pipeline::Media& image) {
  return {{"key", key},
          {"index", std::to_string(index)},
          {"step", std::to_string(step)},
          {"total", std::to_string(job::steps_of(unit.request.fields))},
          {"media_type", job::media_type_of(job::preview_format(*unit.spec.output_format))},
          {"width", std::to_string(image.width)},
          {"height", std::to_string(image.height)}};
}

// Whether repeating the call may succeed. Missing permissions in Redis are no fault of the unit, and an administrator
// may restore them.
bool is_transient(const Error& error) {
  return error.code == Code::kUnavailable || error.code == Code::kDeadlineExceeded ||
         error.code == Code::kResourceExhausted || error.code == Code::kPermissionDenied;
}

// Redis or the S3 store is away or full, for other workers too, so the unit waits for it here.
bool is_outage(const Error& error) {
  return error.source != Source::kHere && (error.code == Code::kUnavailable || error.code == Code::kDeadlineExceeded ||
                                           error.code == Code::kResourceExhausted);
}

}  // namespace

UnitRunner::UnitRunner(Parts parts)
    : parts_(std::move(parts)), checkpoints_(parts_.queue, parts_.store, parts_.checkpoint_interval) {}

void UnitRunner::spawn(const char* what, const UnitPtr& unit, asio::awaitable<void> task) {
  ++tasks_running_;
  parts_.tasks.spawn(std::string(what) + " " + unit->label(), counted(std::move(task)));
}

asio::awaitable<void> UnitRunner::counted(asio::awaitable<void> task) {
  struct Guard {
    UnitRunner& runner;
    ~Guard() {
      --runner.tasks_running_;
      runner.parts_.table_changed();
    }
  } guard{*this};
  co_await std::move(task);
}

asio::awaitable<void> UnitRunner::stage(const char* what, UnitPtr unit, asio::awaitable<void> task) {
  std::string thrown;
  try {
    co_await std::move(task);
  } catch (const std::exception& e) {
    if (parts_.tasks.stopping()) throw;
    thrown = e.what();
  }
  if (thrown.empty()) co_return;
  parts_.table.encoded(unit->entry.nonce);
  Error error = unavailable(std::string("[worker] an exception ended the stage '") + what + "': " + thrown);
  co_await fail(unit, std::move(error));
}

template <class T>
asio::awaitable<Result<T>> UnitRunner::run_on(NamedThread& thread, Watchdog::Work kind, UnitPtr unit,
                                              std::function<Result<T>()> work) {
  struct Watch {
    Watchdog& watchdog;
    const Unit& unit;
    ~Watch() { watchdog.ended(unit.entry.nonce, Clock::now()); }
  } watch{parts_.watchdog, *unit};
  parts_.watchdog.began(unit->entry.nonce, kind, unit->entry.class_key, Clock::now());
  co_return co_await thread.run<T>(std::move(work), Deadline::never());
}

void UnitRunner::fail_stuck(const Watchdog::Stuck& stuck) {
  const Error error{Code::kDeviceFault, stuck.message, {}};
  const auto at = units_.find(stuck.nonce);
  if (at == units_.end()) return parts_.fault(error);
  const UnitPtr unit = at->second;
  spawn("fail", unit, fail(unit, error));
}

asio::awaitable<void> UnitRunner::pause(std::chrono::milliseconds time) {
  asio::steady_timer timer(parts_.executor, time);
  co_await timer.async_wait(asio::use_awaitable);
}

void UnitRunner::assign(queue::MailboxEntry entry, const ModelSet& models) {
  const auto now = Clock::now();
  const queue::Attempt attempt{entry.ref, entry.nonce};
  auto made = make_unit(entry, models, now);
  if (made && !(*made)->spec.loras.empty() && !parts_.adapters.takes_adapters())
    made = invalid_argument("this worker does not support adapters", "loras");
  if (!made) {
    auto unit = std::make_shared<Unit>();
    unit->entry = std::move(entry);
    unit->log(spdlog::level::warn, "rejected: {}", made.error().message);
    spawn("fail", unit, fail(unit, made.error()));
    return;
  }
  const UnitPtr unit = std::move(*made);
  const bool needs_adapters = !unit->spec.loras.empty();
  switch (parts_.table.assign(attempt, now, needs_adapters)) {
    case UnitTable::Admission::kDuplicate: return;
    case UnitTable::Admission::kRefused:
      spawn("hand back", unit, hand_back(unit, parts_.table.draining() ? StopReason::kDrained : StopReason::kNone));
      return;
    case UnitTable::Admission::kAccepted: break;
  }
  begin_span(*unit);
  unit->log(spdlog::level::info, "assigned, attempt {}, class {}, {} steps", unit->entry.attempt, unit->entry.class_key,
            job::steps_of(unit->request.fields));
  units_.emplace(attempt.nonce, unit);
  // At once, while the device works on other units: the scheduler assigns ahead so that adapters load in time.
  if (needs_adapters) spawn("load the adapters of", unit, stage("load the adapters", unit, load_adapters(unit)));
}

void UnitRunner::perform(const Action& action) {
  const auto at = units_.find(action.attempt.nonce);
  if (at == units_.end()) return;
  const UnitPtr unit = at->second;
  switch (action.kind) {
    case Action::Kind::kEncodeText:
      spawn("encode the text of", unit, stage("encode the text", unit, encode_text(unit)));
      return;
    case Action::Kind::kStart: spawn("start", unit, stage("start", unit, start(unit))); return;
    case Action::Kind::kDenoise: spawn("denoise", unit, stage("denoise", unit, denoise(unit))); return;
    case Action::Kind::kStopDenoising:
      unit->leaves = parts_.table.stop_reason(action.attempt.nonce) == StopReason::kDrained;
      unit->pauses = parts_.table.stop_reason(action.attempt.nonce) == StopReason::kPaused;
      unit->stop = true;
      return;
    case Action::Kind::kReportCanceled: spawn("report the cancel of", unit, report_canceled(unit)); break;
    case Action::Kind::kHandBack: spawn("hand back", unit, hand_back(unit, action.reason)); break;
    case Action::Kind::kForget:
      unit->span.rename();  // as in hand_back()
      end_span(*unit, "taken_away");
      unit->log(spdlog::level::info, "revoked");
      break;
  }
  unit->stop = true;
  forget(action.attempt.nonce);
}

void UnitRunner::forget(const std::string& nonce) {
  units_.erase(nonce);
  const auto shares = [this](const auto& held) { return held.second->entry.ref.job == images_job_; };
  if (std::any_of(units_.begin(), units_.end(), shares)) return;
  images_job_.clear();
  images_.clear();
  mask_.reset();
}

asio::awaitable<void> UnitRunner::load_adapters(UnitPtr unit) {
  const std::string& nonce = unit->entry.nonce;
  AdapterLoader::Request request;
  request.model = unit->model;
  request.uses = unit->spec.loras;
  request.drops = {unit->entry.drop_from_host, unit->entry.drop_from_slots};
  request.context = unit->span.context();
  request.wanted = [this, unit] {
    parts_.watchdog.adapters_progressed(Clock::now());
    return units_.contains(unit->entry.nonce);
  };
  parts_.watchdog.began(nonce, Watchdog::Work::kAdapters, unit->entry.class_key, Clock::now());
  auto loaded = co_await parts_.adapters.load(std::move(request));
  parts_.watchdog.ended(nonce, Clock::now());
  parts_.watchdog.adapters_progressed(Clock::now());
  parts_.residents_changed();
  if (!units_.contains(nonce)) co_return;
  if (!loaded) {
    Error error = loaded.error();
    if (error.code == Code::kCanceled)
      error.code = Code::kUnavailable;  // this unit waited for the fetch of another unit, which was canceled
    co_await fail(unit, std::move(error));
    co_return;
  }
  unit->request.loras = std::move(loaded->loras);
  unit->copies = std::move(loaded->copies);
  unit->phases_us["adapter"] = us_since(unit->received);
  parts_.table.adapters_ready(nonce);
  parts_.table_changed();
}

asio::awaitable<Result<std::string>> UnitRunner::read_input(UnitPtr unit, std::string sha256, std::string field) {
  auto give_up = Deadline::after(kStoreLimit);
  for (;;) {
    auto file = co_await parts_.store.get_input(sha256, Deadline::after(kStoreTimeout));
    if (!file && is_outage(file.error())) give_up = Deadline::after(kStoreLimit);
    if (!file && is_transient(file.error()) && !give_up.passed() && units_.contains(unit->entry.nonce)) {
      co_await pause(kPause);
      continue;
    }
    // Another worker would not find it either.
    if (!file && file.error().code == Code::kNotFound) co_return invalid_argument(file.error().message, field);
    co_return file;
  }
}

asio::awaitable<void> UnitRunner::encode_text(UnitPtr unit) {
  // By field, unless another unit of the job has left its images here.
  const auto inputs = std::make_shared<std::vector<std::pair<std::string, std::string>>>();
  if (images_job_ == unit->entry.ref.job) {
    unit->request.images = images_;
    unit->request.mask = mask_;
  } else {
    for (const char* name : {"image", "mask"}) {
      for (const std::string& sha256 : unit->spec.fields.images(*job::find_field(name))) {
        auto file = co_await read_input(unit, sha256, name);
        if (!file) {
          parts_.table.encoded(unit->entry.nonce);
          if (units_.contains(unit->entry.nonce)) co_await fail(unit, file.error());
          parts_.table_changed();
          co_return;
        }
        inputs->emplace_back(name, std::move(*file));
      }
    }
  }
  auto found = co_await checkpoints_.find(unit);
  if (!found) {
    parts_.table.encoded(unit->entry.nonce);
    if (units_.contains(unit->entry.nonce)) co_await fail(unit, found.error());
    parts_.table_changed();
    co_return;
  }
  const auto state = std::make_shared<std::string>(std::move(*found));
  // A variable, because GCC 12 destroys a temporary in a co_await expression twice.
  const std::function<Result<void>()> work = [unit, inputs, state, context = unit->span.context()]() -> Result<void> {
    const telemetry::ContextScope scope(context);
    telemetry::ScopedSpan span("text_encode");
    for (const auto& [field, file] : *inputs) {
      if (auto added = add_image(unit->request, field, file); !added) {
        span.failed(added.error().message);
        return added;
      }
    }
    auto prepared = unit->model->encode(unit->request);
    if (!prepared) {
      span.failed(prepared.error().message);
      return prepared.error();
    }
    unit->prepared = std::move(*prepared);
    if (!state->empty()) unit->prepared->go_on_from(std::move(*state));
    return {};
  };
  auto done = co_await run_on(parts_.text, Watchdog::Work::kText, unit, work);
  if (done && !unit->request.images.empty() && units_.contains(unit->entry.nonce)) {
    images_job_ = unit->entry.ref.job;
    images_ = unit->request.images;
    mask_ = unit->request.mask;
  }
  unit->request.images.clear();
  unit->request.mask.reset();
  parts_.table.encoded(unit->entry.nonce);
  parts_.residents_changed();
  if (!done && units_.contains(unit->entry.nonce))
    co_await fail(unit, with_adapter_names(done.error(), unit->spec.loras, unit->request.loras));
  parts_.table_changed();
}

asio::awaitable<void> UnitRunner::start(UnitPtr unit) {
  const std::string& nonce = unit->entry.nonce;
  while (parts_.table.stop_reason(nonce) == StopReason::kNone) {
    auto begun = co_await parts_.queue.start(unit->attempt(), Deadline::after(kCallTimeout));
    if (begun) {
      start_log_.reset();
      parts_.table.started(nonce, Clock::now());
      parts_.table_changed();
      co_return;
    }
    if (begun.error().code == Code::kConflict || begun.error().code == Code::kNotFound) {
      parts_.table.start_refused(nonce);
      parts_.table_changed();
      co_return;
    }
    if (const auto more = start_log_.admit())
      unit->log(spdlog::level::warn, "cannot start yet: {}{}", begun.error().message, *more);
    co_await pause(kPause);
  }
  parts_.table.stopped(nonce);
  parts_.table_changed();
}

Result<pipeline::Media> UnitRunner::generate(const UnitPtr& unit, const telemetry::SpanContext& context) {
  const telemetry::ContextScope scope(context);
  const auto energy_before = parts_.energy_j();
  static const telemetry::Counters compiles("ditfleet_region_compiles_total");
  const double compiles_before = compiles.total();
  std::optional<telemetry::ScopedSpan> span;
  span.emplace("first_step");
  StepTimer timer(unit->spec.model);
  auto stored_at = Clock::now();
  std::string no_checkpoint;  // why none can be stored; empty: one can
  const auto on_step = [&](const pipeline::StepProgress& progress) {
    const auto took = timer.ended(progress);
    if (progress.step == 1) {
      unit->first_step_us = took.count();
      span.reset();
      if (progress.total > 1) {
        span.emplace("steady_steps");
        span->attribute("ditfleet.steps", std::int64_t{progress.total - 1});
      }
    }
    const bool last = progress.step == progress.total;
    const bool looked_at = progress.step == unit->spec.pause_after_steps && progress.step > unit->went_on_from && !last;
    // A worker that leaves stores a checkpoint unless only a little would be lost.
    const auto unstored = Clock::now() - stored_at, interval = Clock::duration(checkpoints_.interval());
    const bool due_now =
        looked_at || unit->pauses || (interval > 0ms && unstored >= (unit->leaves ? interval / 10 : interval));
    if (no_checkpoint.empty() && due_now && !last && progress.state) {
      stored_at = Clock::now();
      if (auto state = progress.state(parts_.checkpoint_bytes); !state) {
        no_checkpoint = state.error().message;  // the next ones would not be smaller
        unit->log(spdlog::level::info, "no checkpoint is stored: {}", no_checkpoint);
      } else {
        asio::post(parts_.executor, [this, unit, step = progress.step, state = std::move(*state)]() mutable {
          unit->next_step = step;
          unit->next_state = std::move(state);
          if (std::exchange(unit->storing, true)) return;
          spawn("store checkpoints of", unit, store_checkpoints(unit));
        });
      }
    }
    const auto due = std::find(unit->preview_steps.begin(), unit->preview_steps.end(), progress.step);
    if (due != unit->preview_steps.end() && progress.preview && !unit->stop) {
      asio::post(parts_.executor, [this, unit] {
        parts_.watchdog.began(unit->entry.nonce, Watchdog::Work::kPreview, unit->entry.class_key, Clock::now());
      });
      if (auto image = progress.preview()) {
        asio::post(parts_.executor,
                   [this, unit, index = static_cast<int>(due - unit->preview_steps.begin()), step = progress.step,
                    image = std::make_shared<pipeline::Media>(std::move(*image))] {
                     ++unit->previews_pending;
                     spawn("encode a preview of", unit, preview(unit, index, step, image));
                   });
      } else {
        unit->log(spdlog::level::warn, "no preview of step {}: {}", progress.step, image.error().message);
      }
    }
    asio::post(parts_.executor, [this, unit, step = progress.step, total = progress.total] {
      const auto next = step < total ? Watchdog::Work::kStep : Watchdog::Work::kDecode;
      parts_.watchdog.began(unit->entry.nonce, next, unit->entry.class_key, Clock::now());
      parts_.table.stepped(unit->entry.nonce, step, total);
      parts_.table_changed();
    });
    timer.begin();
    // Without a checkpoint, the job would begin again and stop here for ever.
    if (looked_at && !no_checkpoint.empty()) {
      unit->warnings.push_back("pause_after_steps has no effect: " + no_checkpoint);
    } else if (looked_at) {
      unit->holds = unit->pauses = unit->stop = true;
      asio::post(parts_.executor, [this, unit] { parts_.table.pause(unit->entry.nonce); });
    }
    return !unit->stop || (unit->pauses && last);
  };
  if (auto denoised = unit->model->denoise(*unit->prepared, on_step); !denoised) {
    if (span && denoised.error().code != Code::kCanceled) span->failed(denoised.error().message);
    return denoised.error();
  }
  span.reset();
  if (unit->stop && !unit->pauses) return Error{Code::kCanceled, "the unit was stopped before decoding", {}};
  span.emplace("vae_decode");
  unit->writer = parts_.open_writer(*unit->spec.output_format, *unit->spec.output_compression);
  auto image =
      unit->model->decode(*unit->prepared, [&unit](const pipeline::Media& so_far) { unit->writer->add(so_far); });
  if (!image) span->failed(image.error().message);
  unit->compiled = std::llround(compiles.total() - compiles_before);
  if (const auto energy = parts_.energy_j(); image && energy && energy_before) {
    static const telemetry::Histograms joules("ditfleet_unit_energy_joules");
    joules({unit->entry.class_key}).Observe(*energy - *energy_before);
    span->attribute("ditfleet.energy_j", *energy - *energy_before);
  }
  return image;
}

asio::awaitable<void> UnitRunner::denoise(UnitPtr unit) {
  const std::string& nonce = unit->entry.nonce;
  unit->denoising_since = Clock::now();
  std::int64_t waited = us_since(unit->received);
  for (const auto& [phase, us] : unit->phases_us) waited -= us;
  for (const auto& [phase, us] : unit->prepared->phases_us()) waited -= us;
  unit->phases_us["wait"] = std::max<std::int64_t>(0, waited);
  const std::function<Result<pipeline::Media>()> work = [this, unit, context = unit->span.context()] {
    return generate(unit, context);
  };
  auto image = co_await run_on(parts_.device, Watchdog::Work::kFirstStep, unit, work);
  parts_.residents_changed();
  // Its destructor waits for the frames that are being encoded.
  if (!image) asio::post(parts_.encode.executor(), [writer = std::exchange(unit->writer, nullptr)] {});
  if (image) {
    parts_.table.denoised(nonce);
    note_warm(unit->entry.class_key);
    spawn("finish", unit, stage("finish", unit, finish(unit, std::make_shared<pipeline::Media>(std::move(*image)))));
  } else if (image.error().code == Code::kCanceled && unit->stop) {
    if (unit->pauses) co_await settle(unit);
    parts_.table.stopped(nonce);
  } else {
    co_await fail(unit, image.error());
  }
  parts_.table_changed();
}

asio::awaitable<void> UnitRunner::store_checkpoints(UnitPtr unit) {
  struct Guard {
    Unit& unit;
    ~Guard() { unit.storing = false; }
  } guard{*unit};
  while (!unit->next_state.empty()) {
    auto state = std::exchange(unit->next_state, {});
    co_await checkpoints_.store(unit, unit->next_step, std::move(state));
  }
}

// What is shown of a paused unit is complete before its lease ends.
asio::awaitable<void> UnitRunner::settle(UnitPtr unit) {
  co_await until_stored(unit, kStored);
  for (int i = 0; i < 100 && unit->previews_pending > 0; ++i) co_await pause(10ms);
  const auto step = parts_.table.take_pending_step(unit->entry.nonce);
  if (step) (void)co_await parts_.queue.renew({&*step, 1}, Deadline::after(kCallTimeout));
}

asio::awaitable<void> UnitRunner::preview(UnitPtr unit, int index, int step, std::shared_ptr<pipeline::Media> image) {
  struct Guard {
    Unit& unit;
    ~Guard() { --unit.previews_pending; }
  } guard{*unit};
  const std::function<Result<std::string>()> work = [this, image, unit] {
    return parts_.open_writer(job::preview_format(*unit->spec.output_format), *unit->spec.output_compression)
        ->finish(*image, "");
  };
  auto bytes = co_await parts_.encode.run<std::string>(work, Deadline::never());
  Result<void> sent;
  if (bytes) {
    auto key = co_await parts_.store.put_preview(result_key_of(*unit), index, std::move(*bytes),
                                                 Deadline::after(kCallTimeout));
    if (key) {
      const auto fields = preview_fields(*unit, *key, index, step, *image);
      sent = co_await parts_.queue.emit(unit->attempt(), "preview", fields, Deadline::after(kCallTimeout));
    } else {
      sent = key.error();
    }
  } else {
    sent = bytes.error();
  }
  if (!sent) unit->log(spdlog::level::warn, "could not send the preview of step {}: {}", step, sent.error().message);
}

asio::awaitable<void> UnitRunner::finish(UnitPtr unit, std::shared_ptr<pipeline::Media> image) {
  const auto begun = Clock::now();
  telemetry::SpanTimer encoding("image_encode", unit->span.context());
  const auto receipt = std::make_shared<std::string>();
  const std::function<Result<std::string>()> work = [image, unit, receipt, carries = parts_.carry_receipts] {
    std::string comment;
    if (!unit->receipt_of_model.empty()) {
      auto [text, id] = receipt_of(unit->receipt_of_model, *unit);
      *receipt = std::move(text);
      if (carries) comment = "DiTFleet receipt " + id;
    }
    return unit->writer->finish(*image, comment);
  };
  auto bytes = co_await run_on(parts_.encode, Watchdog::Work::kImage, unit, work);
  if (!bytes) {
    encoding.failed(bytes.error().message);
    encoding.end();
    co_await fail(unit, bytes.error());
    co_return;
  }
  encoding.attribute("ditfleet.media_type", job::media_type_of(*unit->spec.output_format));
  encoding.attribute("ditfleet.bytes", static_cast<std::int64_t>(bytes->size()));
  encoding.end();
  unit->phases_us["encode"] = us_since(begun);
  for (const auto& [phase, us] : unit->prepared->phases_us()) unit->phases_us[phase] += us;
  const auto storing = Clock::now();
  telemetry::SpanTimer store_span("result_store", unit->span.context());
  auto manifest = co_await store(unit, std::make_shared<std::string>(std::move(*bytes)));
  if (!manifest) store_span.failed(manifest.error().message);
  store_span.end();
  if (!manifest) {
    // The store was unavailable until the unit was lost. It has not failed, and another worker may have it now.
    if (is_transient(manifest.error()) && !parts_.table.may_complete(unit->entry.nonce, Clock::now())) {
      unit->log(spdlog::level::warn, "not stored before the unit was lost: {}", manifest.error().message);
      co_await drop(unit);
    } else {
      co_await fail(unit, manifest.error());
    }
    co_return;
  }
  unit->phases_us["store"] = us_since(storing);
  manifest->width = image->width;
  manifest->height = image->height;
  manifest->seed = unit->request.seed;
  manifest->skipped_steps = unit->prepared->skipped_steps();
  manifest->gpu_us = gpu_us_of(*unit);
  manifest->first_step_us = unit->first_step_us;
  manifest->compiled = unit->compiled;
  manifest->receipt = std::move(*receipt);
  // A preview event must not follow the end of the unit.
  for (int i = 0; i < 100 && unit->previews_pending > 0; ++i) co_await pause(10ms);
  co_await complete(unit, std::move(*manifest));
}

asio::awaitable<Result<results::Manifest>> UnitRunner::store(UnitPtr unit, std::shared_ptr<std::string> bytes) {
  auto give_up = Deadline::after(kStoreLimit);
  while (true) {
    auto manifest = co_await parts_.store.put(
        result_key_of(*unit), *bytes, job::media_type_of(*unit->spec.output_format), Deadline::after(kStoreTimeout));
    if (manifest) store_log_.reset();
    if (!manifest && is_outage(manifest.error())) give_up = Deadline::after(kStoreLimit);
    // If the unit is lost, another worker stores a result. Else it fails here and may be retried elsewhere.
    if (manifest || !is_transient(manifest.error()) || give_up.passed() ||
        !parts_.table.may_complete(unit->entry.nonce, Clock::now())) {
      co_return manifest;
    }
    if (const auto more = store_log_.admit()) {
      unit->log(spdlog::level::warn, "cannot store the result yet: {}{}", manifest.error().message, *more);
    }
    co_await pause(kPause);
  }
}

asio::awaitable<void> UnitRunner::complete(UnitPtr unit, results::Manifest manifest) {
  const std::string nonce = unit->entry.nonce;
  if (const auto step = parts_.table.take_pending_step(nonce)) {
    // The last step is reported before the end. The completion implies it, so a failure is ignored.
    const auto ignored = co_await parts_.queue.renew({&*step, 1}, Deadline::after(kCallTimeout));
    (void)ignored;
  }
  queue::Completion completion;
  completion.attempt = unit->attempt();
  completion.manifest = manifest.to_json();
  completion.phases_us = unit->phases_us;
  completion.warnings = unit->prepared->warnings();
  completion.warnings.insert(completion.warnings.end(), unit->warnings.begin(), unit->warnings.end());
  if (!parts_.table.may_complete(nonce, Clock::now())) {
    unit->log(spdlog::level::warn, "the unit was lost before it was complete; discarding the result");
    co_await discard(unit, std::move(manifest));
    co_return;
  }
  const auto call = [&] { return parts_.queue.complete(completion, Deadline::after(kCallTimeout)); };
  const auto completed = co_await report(call, Deadline::after(parts_.orphan));
  if (completed) {
    end_span(*unit, "succeeded");
    record_unit(unit->spec.model, unit->phases_us, unit->prepared->device_phases_us(), unit->model->memory().plan);
    if (!std::exchange(first_image_, true)) record_boot("first_image");
    unit->log(spdlog::level::info, "succeeded in {} ms, {} bytes", us_since(unit->received) / 1000, manifest.bytes);
    co_await until_stored(unit, kStored);
    co_await checkpoints_.drop(unit);
  } else if (completed.error().code != Code::kConflict) {
    // A call may have completed the unit although its answer was lost. Only a refusal proves that none did, so the
    // result stays.
    unit->log(spdlog::level::err, "could not report the completion: {}", completed.error().message);
  } else {
    unit->log(spdlog::level::warn, "the queue rejected the completion: {}", completed.error().message);
    co_await discard(unit, std::move(manifest));
    co_return;
  }
  forget(nonce);
  parts_.table.ended(nonce);
}

// For an attempt that is stale, or has to count as stale.
asio::awaitable<void> UnitRunner::discard(UnitPtr unit, results::Manifest manifest) {
  auto removed = co_await parts_.store.remove(manifest, Deadline::after(kCallTimeout));
  if (!removed)
    unit->log(spdlog::level::info, "could not remove the result, which stays until it expires: {}",
              removed.error().message);
  co_await drop(unit);
}

asio::awaitable<void> UnitRunner::drop(UnitPtr unit) {
  end_span(*unit, "stale");
  forget(unit->entry.nonce);
  parts_.table.ended(unit->entry.nonce);
  co_await hand_back(unit, StopReason::kLost);
}

template <class Call>
asio::awaitable<Result<void>> UnitRunner::report(Call call, Deadline give_up, std::chrono::milliseconds max_pause) {
  std::chrono::milliseconds wait = kPause;
  while (true) {
    auto result = co_await call();
    if (result || !is_transient(result.error()) || give_up.passed()) co_return result;
    co_await pause(wait);
    wait = std::max(wait, std::min(2 * wait, max_pause));
  }
}

asio::awaitable<void> UnitRunner::hand_back(UnitPtr unit, StopReason reason) {
  const char* text = reason == StopReason::kPaused     ? "the job is paused"
                     : reason == StopReason::kDrained  ? "this worker is draining"
                     : reason == StopReason::kOrphaned ? "Redis did not answer for worker.orphan_ms"
                     : reason == StopReason::kLost     ? "the attempt is stale"
                                                       : "this worker is full";
  const bool lapsed = reason == StopReason::kOrphaned || reason == StopReason::kLost;
  if (!lapsed) unit->span.rename();  // the next assignment has the number of this attempt
  end_span(*unit, lapsed ? "stale" : "handed_back");
  unit->log(spdlog::level::info, "handed back: {}", text);
  // The lease of a unit that is still held runs on: a slow store must not cost it.
  co_await until_stored(unit, lapsed ? kStored : kStoredInTime);
  if (lapsed) co_await checkpoints_.drop_if_ended(unit);
  const auto attempt = unit->attempt();
  if (unit->holds) {
    bool held = false;
    const auto hold = [&]() -> asio::awaitable<Result<void>> {
      auto done = co_await parts_.queue.hold(attempt, Deadline::after(kCallTimeout));
      if (!done) co_return done.error();
      held = *done;
      co_return Result<void>();
    };
    (void)co_await report(hold, Deadline::after(parts_.orphan));
    if (held) co_return;
  }
  const auto call = [&] { return parts_.queue.hand_back({&attempt, 1}, Deadline::after(kCallTimeout)); };
  // The queue counts a lapse as a crash of this worker until the report arrives, however long Redis is unreachable.
  struct Count {
    int& count;
    ~Count() { --count; }
  } counted{++handing_back_};
  const auto give_up = lapsed && handing_back_ <= kMostHandedBack ? Deadline::never() : Deadline::after(parts_.orphan);
  // While the lease runs on, the queue must hear it soon after Redis is back.
  (void)co_await report(call, give_up, lapsed ? std::chrono::milliseconds(kMaxPause) : kPause);
}

asio::awaitable<void> UnitRunner::until_stored(UnitPtr unit, std::chrono::milliseconds most) {
  for (const auto limit = Deadline::after(most); unit->storing && !limit.passed();) co_await pause(10ms);
}

asio::awaitable<void> UnitRunner::report_canceled(UnitPtr unit) {
  end_span(*unit, "canceled");
  unit->log(spdlog::level::info, "canceled");
  co_await until_stored(unit, kStored);
  co_await checkpoints_.drop(unit);
  const auto attempt = unit->attempt();
  const auto call = [&] { return parts_.queue.canceled(attempt, Deadline::after(kCallTimeout)); };
  (void)co_await report(call, Deadline::after(parts_.orphan));
}

asio::awaitable<void> UnitRunner::fail(UnitPtr unit, Error error) {
  if (std::exchange(unit->failed, true)) co_return;  // work that was stuck and ends after all
  unit->span.failed(error.message);
  unit->span.attribute("error.type", std::string(code_name(error.code)));
  end_span(*unit, "failed");
  unit->log(spdlog::level::err, "failed: {}", error.message);
  // The checkpoint may be the reason. That of a unit that was lost is another attempt's.
  const bool held = parts_.table.may_complete(unit->entry.nonce, Clock::now());
  if (held && unit->went_on_from > 0 && unit->spec.resume_from.empty()) co_await checkpoints_.drop(unit);
  const bool fault = error.code == Code::kDeviceFault;
  // Another worker may have the model, more memory or a working device. A wrong spec and a deleted adapter stay wrong.
  const bool other_worker = error.code == Code::kNotFound && !error.param.starts_with("loras");
  queue::Failure failure;
  failure.attempt = unit->attempt();
  failure.error = error;
  failure.retryable = other_worker || is_retryable(error.code);
  failure.crash = fault;
  forget(unit->entry.nonce);
  parts_.table.ended(unit->entry.nonce);
  if (fault) parts_.fault(error);
  parts_.table_changed();
  const auto call = [&] { return parts_.queue.fail(failure, Deadline::after(kCallTimeout)); };
  (void)co_await report(call, Deadline::after(fault ? kCallTimeout : parts_.orphan));
}

void UnitRunner::note_warm(const std::string& class_key) {
  if (class_key.empty()) return;
  std::erase(warm_classes_, class_key);
  warm_classes_.push_back(class_key);
  if (warm_classes_.size() > kMaxWarmClasses) warm_classes_.erase(warm_classes_.begin());
}

}  // namespace ditfleet::worker
