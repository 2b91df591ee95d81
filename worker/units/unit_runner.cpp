// Long because it is one life: each action on a unit is a coroutine, and how one ends is where the next begins.
#include "worker/units/unit_runner.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/asio/post.hpp>

#include "worker/model_timings.h"
#include "worker/units/request.h"
#include "worker/units/unit_spans.h"

namespace ditfleet::worker {
namespace {

using namespace std::chrono_literals;

constexpr auto kCallTimeout = 2s;    // of one queue call
constexpr auto kStoreTimeout = 30s;  // of storing one result
constexpr auto kStoreFor = 10s;      // how long storing is tried again on one worker; a full disk stays full
constexpr auto kReportFor = 60s;     // how long an end is reported while Redis is away
constexpr auto kPause = 200ms;       // between two tries
constexpr std::size_t kMaxWarmClasses = 64;

std::int64_t us_since(Clock::time_point then) {
  return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - then).count();
}

results::ResultKey result_key_of(const Unit& unit) {
  return {unit.entry.ref.job, unit.entry.ref.unit, unit.entry.nonce};
}

// (Not in the coroutine: GCC 12 frees an initializer list there too early.)
std::map<std::string, std::string> preview_fields(const Unit& unit, const std::string& key, int index, int step,
                                                  const pipeline::Media& image) {
  return {{"key", key},
          {"index", std::to_string(index)},
          {"step", std::to_string(step)},
          {"total", std::to_string(unit.request.fields.integer("num_inference_steps").value_or(0))},
          {"media_type", job::media_type_of(*unit.spec.output_format)},
          {"width", std::to_string(image.width)},
          {"height", std::to_string(image.height)}};
}

// Whether asking again may get an answer; otherwise the error is the answer. Rights that Redis withholds say nothing of
// the unit: whoever took them may give them back.
bool is_away(const Error& error) {
  return error.code == Code::kUnavailable || error.code == Code::kDeadlineExceeded ||
         error.code == Code::kResourceExhausted || error.code == Code::kPermissionDenied;
}

}  // namespace

UnitRunner::UnitRunner(Parts parts) : parts_(std::move(parts)) {}

void UnitRunner::spawn(const char* what, const UnitPtr& unit, asio::awaitable<void> task) {
  ++tasks_running_;
  parts_.tasks.spawn(std::string(what) + " " + unit->label(), counted(std::move(task)));
}

asio::awaitable<void> UnitRunner::counted(asio::awaitable<void> task) {
  struct Guard {
    UnitRunner& runner;
    ~Guard() {
      --runner.tasks_running_;
      runner.parts_.changed();
    }
  } guard{*this};
  co_await std::move(task);
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
    made = invalid_argument("this worker takes no adapters", "loras");
  if (!made) {
    auto unit = std::make_shared<Unit>();
    unit->entry = std::move(entry);
    spdlog::warn("unit {}: refused: {}", unit->label(), made.error().message);
    spawn("fail", unit, fail(unit, made.error()));
    return;
  }
  const UnitPtr unit = std::move(*made);
  const bool needs_adapters = !unit->spec.loras.empty();
  switch (parts_.holdings.assign(attempt, now, needs_adapters)) {
    case Holdings::Admitted::kDuplicate: return;
    case Holdings::Admitted::kRefused:
      spawn("hand back", unit, hand_back(unit, parts_.holdings.draining() ? Stop::kDrained : Stop::kNone));
      return;
    case Holdings::Admitted::kTaken: break;
  }
  spdlog::info("unit {}: assigned, attempt {}, class {}, {} steps", unit->label(), unit->entry.attempt,
               unit->entry.class_key, unit->request.fields.integer("num_inference_steps").value_or(0));
  begin_span(*unit);
  units_.emplace(attempt.nonce, unit);
  // At once, whatever the device and the texts of others are at: this is what the scheduler looks ahead for.
  if (needs_adapters) spawn("adapters of", unit, bring_adapters(unit));
}

void UnitRunner::perform(const Action& action) {
  const auto at = units_.find(action.attempt.nonce);
  if (at == units_.end()) return;
  const UnitPtr unit = at->second;
  switch (action.kind) {
    case Action::Kind::kEncodeText: spawn("text of", unit, encode_text(unit)); return;
    case Action::Kind::kStart: spawn("start", unit, start(unit)); return;
    case Action::Kind::kDenoise: spawn("denoise", unit, denoise(unit)); return;
    case Action::Kind::kStopDenoising: unit->stop = true; return;
    case Action::Kind::kReportCanceled: spawn("cancel", unit, report_canceled(unit)); break;
    case Action::Kind::kHandBack: spawn("hand back", unit, hand_back(unit, action.why)); break;
    case Action::Kind::kForget:
      end_span(*unit, "taken_away"), spdlog::info("unit {}: taken away", unit->label());
      break;
  }
  unit->stop = true;
  units_.erase(action.attempt.nonce);
}

void UnitRunner::publish_leases() {
  for (auto& [nonce, unit] : units_) unit->lease_until = parts_.holdings.lease_until(nonce).time_since_epoch().count();
}

asio::awaitable<void> UnitRunner::bring_adapters(UnitPtr unit) {
  const std::string& nonce = unit->entry.nonce;
  AdapterLoader::Wish wish;
  wish.model = unit->model;
  wish.uses = unit->spec.loras;
  wish.drops = {unit->entry.drop_from_host, unit->entry.drop_from_slots};
  wish.context = unit->span.context();
  wish.wanted = [this, unit] { return units_.contains(unit->entry.nonce); };
  auto brought = co_await parts_.adapters.bring(std::move(wish));
  parts_.adapters_moved();
  if (!units_.contains(nonce)) co_return;
  if (!brought) {
    Error error = brought.error();
    if (error.code == Code::kCanceled)
      error.code = Code::kUnavailable;  // another unit's fetch ended, and this one's with it
    co_await fail(unit, std::move(error));
    co_return;
  }
  unit->request.loras = std::move(brought->loras);
  unit->copies = std::move(brought->copies);
  unit->phases_us["adapter"] = us_since(unit->received);
  parts_.holdings.adapters_there(nonce);
  parts_.changed();
}

asio::awaitable<void> UnitRunner::encode_text(UnitPtr unit) {
  // (Named: GCC 12 destroys a temporary of a co_await expression twice.)
  const std::function<Result<bool>()> work = [unit, context = unit->span.context()]() -> Result<bool> {
    const telemetry::ContextScope scope(context);
    telemetry::ScopedSpan span("text_encode");
    auto prepared = unit->model->encode(unit->request);
    if (!prepared) {
      span.failed(prepared.error().message);
      return prepared.error();
    }
    unit->prepared = std::move(*prepared);
    return true;
  };
  auto done = co_await parts_.text.run<bool>(work, Deadline::never());
  parts_.holdings.encoded(unit->entry.nonce);
  if (!unit->spec.loras.empty()) parts_.adapters_moved();
  if (!done && units_.contains(unit->entry.nonce))
    co_await fail(unit, with_names(done.error(), unit->spec.loras, unit->request.loras));
  parts_.changed();
}

asio::awaitable<void> UnitRunner::start(UnitPtr unit) {
  const std::string& nonce = unit->entry.nonce;
  // A repeated start does not lengthen the lease that an earlier one began unheard.
  const auto first_sent = Clock::now();
  while (parts_.holdings.stop_of(nonce) == Stop::kNone && Clock::now() < parts_.holdings.lease_until(nonce)) {
    auto begun = co_await parts_.queue.start(unit->attempt(), Deadline::after(kCallTimeout));
    if (begun) {
      cannot_start_.reset();
      parts_.holdings.started(nonce, first_sent);
      publish_leases();
      parts_.changed();
      co_return;
    }
    if (begun.error().code == Code::kConflict || begun.error().code == Code::kNotFound) {
      parts_.holdings.start_refused(nonce);
      parts_.changed();
      co_return;
    }
    if (const auto more = cannot_start_.admit())
      spdlog::warn("unit {}: cannot start yet: {}{}", unit->label(), begun.error().message, *more);
    co_await pause(kPause);
  }
  parts_.holdings.stopped(nonce);
  parts_.changed();
}

Result<pipeline::Media> UnitRunner::draw(const UnitPtr& unit, const telemetry::SpanContext& context) {
  const telemetry::ContextScope scope(context);
  std::optional<telemetry::ScopedSpan> span;
  span.emplace("first_step");
  StepTimer timer(unit->spec.model);
  const auto on_step = [&](const pipeline::StepProgress& progress) {
    timer.ended(progress.step);
    if (progress.step == 1) {
      span.reset();
      if (progress.total > 1) {
        span.emplace("steady_steps");
        span->attribute("ditfleet.steps", std::int64_t{progress.total - 1});
      }
    }
    const auto due = std::find(unit->preview_steps.begin(), unit->preview_steps.end(), progress.step);
    if (due != unit->preview_steps.end() && progress.preview && !unit->must_stop()) {
      if (auto image = progress.preview()) {
        asio::post(parts_.executor,
                   [this, unit, index = static_cast<int>(due - unit->preview_steps.begin()), step = progress.step,
                    image = std::make_shared<pipeline::Media>(std::move(*image))] {
                     ++unit->previews_pending;
                     spawn("preview of", unit, preview(unit, index, step, image));
                   });
      } else {
        spdlog::warn("unit {}: no preview of step {}: {}", unit->label(), progress.step, image.error().message);
      }
    }
    asio::post(parts_.executor, [this, unit, step = progress.step, total = progress.total] {
      parts_.holdings.stepped(unit->entry.nonce, step, total);
      parts_.changed();
    });
    timer.begin();
    return !unit->must_stop();
  };
  if (auto denoised = unit->model->denoise(*unit->prepared, on_step); !denoised) {
    if (span && denoised.error().code != Code::kCanceled) span->failed(denoised.error().message);
    return denoised.error();
  }
  span.reset();
  if (unit->must_stop()) return Error{Code::kCanceled, "stopped before decoding", {}};
  span.emplace("vae_decode");
  auto image = unit->model->decode(*unit->prepared);
  if (!image) span->failed(image.error().message);
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
    return draw(unit, context);
  };
  auto image = co_await parts_.device.run<pipeline::Media>(work, Deadline::never());
  if (image) {
    parts_.holdings.denoised(nonce);
    note_warm(unit->entry.class_key);
    spawn("finish", unit, finish(unit, std::make_shared<pipeline::Media>(std::move(*image))));
  } else if (image.error().code == Code::kCanceled) {
    parts_.holdings.stopped(nonce);
  } else {
    co_await fail(unit, image.error());
  }
  parts_.changed();
}

asio::awaitable<void> UnitRunner::preview(UnitPtr unit, int index, int step, std::shared_ptr<pipeline::Media> image) {
  struct Guard {
    Unit& unit;
    ~Guard() { --unit.previews_pending; }
  } guard{*unit};
  const std::function<Result<std::string>()> work = [this, image, unit] {
    return parts_.encode_image(*image, *unit->spec.output_format, *unit->spec.output_compression);
  };
  auto bytes = co_await parts_.encode.run<std::string>(work, Deadline::never());
  Result<void> told;
  if (bytes) {
    auto key = co_await parts_.store.put_preview(result_key_of(*unit), index, std::move(*bytes),
                                                 Deadline::after(kCallTimeout));
    if (key) {
      const auto fields = preview_fields(*unit, *key, index, step, *image);
      told = co_await parts_.queue.emit(unit->attempt(), "preview", fields, Deadline::after(kCallTimeout));
    } else {
      told = key.error();
    }
  } else {
    told = bytes.error();
  }
  if (!told) spdlog::warn("unit {}: the preview of step {} is lost: {}", unit->label(), step, told.error().message);
}

asio::awaitable<void> UnitRunner::finish(UnitPtr unit, std::shared_ptr<pipeline::Media> image) {
  const auto begun = Clock::now();
  telemetry::SpanTimer encoding("image_encode", unit->span.context());
  const std::function<Result<std::string>()> work = [this, image, unit] {
    return parts_.encode_image(*image, *unit->spec.output_format, *unit->spec.output_compression);
  };
  auto bytes = co_await parts_.encode.run<std::string>(work, Deadline::never());
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
    // Away so long that the lease ran out: no failure of the unit, and not this worker's to end any more.
    if (is_away(manifest.error()) && !parts_.holdings.may_complete(unit->entry.nonce, Clock::now())) {
      spdlog::warn("unit {}: not stored before its lease ran out: {}", unit->label(), manifest.error().message);
      co_await let_go(unit);
    } else {
      co_await fail(unit, manifest.error());
    }
    co_return;
  }
  unit->phases_us["store"] = us_since(storing);
  manifest->width = image->width;
  manifest->height = image->height;
  manifest->seed = unit->request.seed;
  // Previews come before the end, or not at all.
  for (int i = 0; i < 100 && unit->previews_pending > 0; ++i) co_await pause(10ms);
  co_await complete(unit, std::move(*manifest));
}

asio::awaitable<Result<results::Manifest>> UnitRunner::store(UnitPtr unit, std::shared_ptr<std::string> bytes) {
  const auto give_up = Clock::now() + kStoreFor;
  while (true) {
    auto manifest = co_await parts_.store.put(
        result_key_of(*unit), *bytes, job::media_type_of(*unit->spec.output_format), Deadline::after(kStoreTimeout));
    if (manifest) cannot_store_.reset();
    // Without the lease it is somebody else's to store; given up with it, the unit fails and may be tried elsewhere.
    if (manifest || !is_away(manifest.error()) || Clock::now() >= give_up ||
        !parts_.holdings.may_complete(unit->entry.nonce, Clock::now())) {
      co_return manifest;
    }
    if (const auto more = cannot_store_.admit()) {
      spdlog::warn("unit {}: cannot store the result yet: {}{}", unit->label(), manifest.error().message, *more);
    }
    co_await pause(kPause);
  }
}

asio::awaitable<void> UnitRunner::complete(UnitPtr unit, results::Manifest manifest) {
  const std::string nonce = unit->entry.nonce;
  if (const auto step = parts_.holdings.take_pending_step(nonce)) {
    // The last step comes before the end; if this call fails the end still tells it all.
    auto told = co_await parts_.queue.renew({&*step, 1}, Deadline::after(kCallTimeout));
    (void)told;
  }
  queue::Completion completion;
  completion.attempt = unit->attempt();
  completion.manifest = manifest.to_json();
  completion.phases_us = unit->phases_us;
  completion.warnings = unit->prepared->warnings();
  if (!parts_.holdings.may_complete(nonce, Clock::now())) {
    spdlog::warn("unit {}: finished after its lease had run out; the result is thrown away", unit->label());
    co_await discard(unit, std::move(manifest));
    co_return;
  }
  const auto give_up = Clock::now() + kReportFor;
  while (true) {
    auto completed = co_await parts_.queue.complete(completion, Deadline::after(kCallTimeout));
    if (completed) {
      end_span(*unit, "succeeded");
      spdlog::info("unit {}: succeeded in {} ms, {} bytes", unit->label(), us_since(unit->received) / 1000,
                   manifest.bytes);
      break;
    }
    if (!is_away(completed.error())) {
      spdlog::warn("unit {}: the result was not wanted: {}", unit->label(), completed.error().message);
      co_await discard(unit, std::move(manifest));
      co_return;
    }
    // The first call went out within the lease and may have done its work: asking again is safe, and only
    // a refusal proves that the bytes belong to nobody.
    if (Clock::now() >= give_up) {
      spdlog::error("unit {}: could not be completed: {}", unit->label(), completed.error().message);
      break;
    }
    co_await pause(kPause);
  }
  units_.erase(nonce);
  parts_.holdings.ended(nonce);
}

// The attempt is stale, or has to count as that.
asio::awaitable<void> UnitRunner::discard(UnitPtr unit, results::Manifest manifest) {
  auto removed = co_await parts_.store.remove(manifest, Deadline::after(kCallTimeout));
  if (!removed) spdlog::info("unit {}: its bytes stay until they expire: {}", unit->label(), removed.error().message);
  co_await let_go(unit);
}

asio::awaitable<void> UnitRunner::let_go(UnitPtr unit) {
  end_span(*unit, "stale");
  const bool lapsed = parts_.holdings.stop_of(unit->entry.nonce) == Stop::kLapsed;
  units_.erase(unit->entry.nonce);
  parts_.holdings.ended(unit->entry.nonce);
  if (lapsed) co_await hand_back(unit, Stop::kLapsed);
}

asio::awaitable<void> UnitRunner::hand_back(UnitPtr unit, Stop why) {
  const char* reason = why == Stop::kDrained  ? "this worker is going away"
                       : why == Stop::kLapsed ? "its lease could not be renewed in time"
                                              : "there is no room";
  end_span(*unit, "handed_back");
  spdlog::info("unit {}: handed back: {}", unit->label(), reason);
  const auto attempt = unit->attempt();
  const auto give_up = Clock::now() + kReportFor;
  while (true) {
    auto done = co_await parts_.queue.hand_back({&attempt, 1}, Deadline::after(kCallTimeout));
    if (done || !is_away(done.error()) || Clock::now() >= give_up) break;
    co_await pause(kPause);
  }
}

asio::awaitable<void> UnitRunner::report_canceled(UnitPtr unit) {
  end_span(*unit, "canceled");
  spdlog::info("unit {}: canceled", unit->label());
  const auto give_up = Clock::now() + kReportFor;
  while (true) {
    auto done = co_await parts_.queue.canceled(unit->attempt(), Deadline::after(kCallTimeout));
    if (done || !is_away(done.error()) || Clock::now() >= give_up) break;
    co_await pause(kPause);
  }
}

asio::awaitable<void> UnitRunner::fail(UnitPtr unit, Error error) {
  unit->span.failed(error.message);
  unit->span.attribute("error.type", std::string(code_name(error.code)));
  end_span(*unit, "failed");
  spdlog::error("unit {}: failed: {}", unit->label(), error.message);
  const bool fault = error.code == Code::kDeviceFault;
  // Another worker may hold the model, have more memory or a sound device; a bad spec stays bad, and so does an adapter
  // that was deleted.
  const bool elsewhere = error.code == Code::kNotFound && !error.param.starts_with("loras");
  const bool retryable = fault || elsewhere || error.code == Code::kOutOfMemory ||
                         (error.code != Code::kInvalidArgument && is_retryable(error.code));
  queue::Failure failure;
  failure.attempt = unit->attempt();
  failure.error = error;
  failure.retryable = retryable;
  failure.crash = fault;
  const auto give_up = Clock::now() + (fault ? std::chrono::seconds(kCallTimeout) : std::chrono::seconds(kReportFor));
  units_.erase(unit->entry.nonce);
  parts_.holdings.failed(unit->entry.nonce);
  if (fault) parts_.fault(error);
  parts_.changed();
  while (true) {
    auto done = co_await parts_.queue.fail(failure, Deadline::after(kCallTimeout));
    if (done || !is_away(done.error()) || Clock::now() >= give_up) break;
    co_await pause(kPause);
  }
}

void UnitRunner::note_warm(const std::string& class_key) {
  if (class_key.empty()) return;
  std::erase(warm_classes_, class_key);
  warm_classes_.push_back(class_key);
  if (warm_classes_.size() > kMaxWarmClasses) warm_classes_.erase(warm_classes_.begin());
}

}  // namespace ditfleet::worker
