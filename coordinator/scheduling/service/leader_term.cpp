// One file for a whole term: its tasks share the scheduler and what they have read of Redis.
#include "coordinator/scheduling/service/leader_term.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "shared/loras/registry_mirror.h"

namespace ditfleet::scheduling {
namespace {

using namespace std::chrono_literals;

constexpr auto kCall = 5s;        // for one call to Redis
constexpr auto kBackOff = 100ms;  // after a failed one
constexpr auto kTick = 100ms;     // between decisions that depend only on time
constexpr auto kRegistryPeriod = 250ms, kReapPeriod = 100ms;
constexpr std::int64_t kSilenceUs = 1'000'000;  // for one call; workers cannot reach Redis meanwhile, either
constexpr std::int64_t kForecastPeriodUs = 1'000'000;
constexpr std::size_t kMostOutlook = 1000;  // queued units
constexpr std::int64_t kAuditPeriodUs = 30'000'000, kDeafAuditPeriodUs = 2'000'000;
constexpr std::size_t kMostAdmitting = 1024;
constexpr int kIntakeBatch = 256;
constexpr std::size_t kMostSummaries = 200'000;  // open jobs that the history follows
constexpr std::size_t kHistoryBatch = 500;       // jobs per call
constexpr std::size_t kMostUnstored = 10'000;    // ended jobs that wait for Redis
constexpr std::int64_t kAuditSpacingUs = 200'000, kMostAuditSpacingUs = 10'000'000;  // doubles with each failure

SchedulerOptions scheduler_options(const SchedulerServiceOptions& options, SchedulerMetrics* metrics) {
  SchedulerOptions out = options.scheduler;
  out.observer = metrics;
  if (options.adapters && !out.adapters) {
    out.adapters = [mirror = options.adapters](const std::string& tenant, const job::LoraUse& use,
                                               const job::ModelEntry& model) {
      return mirror->resolve(tenant, use.name, use.sha256, model.name);
    };
  }
  return out;
}

bool may_name_adapters(const queue::IntakeEntry& entry) { return entry.spec.find("\"loras\"") != std::string::npos; }

void log_line(const FleetLine& line) {
  spdlog::log(line.warning ? spdlog::level::warn : spdlog::level::info, "scheduler: {}", line.text);
}

}  // namespace

std::int64_t monotonic_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

LeaderTerm::LeaderTerm(Context context, std::int64_t epoch)
    : context_(std::move(context)),
      epoch_(epoch),
      scheduler_(std::make_unique<Scheduler>(scheduler_options(*context_.options, context_.metrics))),
      tasks_(context_.executor),
      wake_(context_.executor),
      keeps_history_(context_.client->options().history_ms > 0 && context_.client->options().history_jobs > 0),
      summaries_(kMostSummaries) {}

void LeaderTerm::spawn(const char* name, asio::awaitable<void> task, Vital vital) {
  const auto keep = [](std::shared_ptr<LeaderTerm>, asio::awaitable<void> t) -> asio::awaitable<void> {
    co_await std::move(t);
  };
  tasks_.spawn(name, keep(shared_from_this(), std::move(task)), vital);
}

void LeaderTerm::start() { spawn("scheduler", run(), Vital::kForever); }

void LeaderTerm::stop() {
  tasks_.stop();
  wake_.cancel();
}

asio::awaitable<void> LeaderTerm::pause(std::chrono::milliseconds time) {
  asio::steady_timer timer(context_.executor, time);
  co_await timer.async_wait(asio::use_awaitable);
}

void LeaderTerm::kick() {
  kicked_ = true;
  wake_.cancel();
}

void LeaderTerm::note_failure(const Error& error, const char* what) {
  if (tasks_.stopping()) return;
  if (error.code == Code::kConflict) {
    spdlog::warn("scheduler: Redis rejected {}: {}", what, error.message);
    context_.fenced();
    return;
  }
  spdlog::debug("scheduler: {} failed: {}", what, error.message);
  audit_wanted_ = true;
}

void LeaderTerm::notice_reconnect() {
  const auto generation = context_.connection->generation();
  if (generation == generation_) return;
  generation_ = generation;
  spdlog::info("scheduler: reconnected to Redis; comparing the state");
  rewind_ = audit_wanted_ = true;
  grant_grace();
}

void LeaderTerm::grant_grace() {
  context_.client->hold_leases();
  scheduler_->grant_grace(context_.client->hold_time().count(), now_us());
}

asio::awaitable<void> LeaderTerm::run() {
  while (!co_await rebuild()) co_await pause(kBackOff);
  spawn("scheduler.feed", follow_feed(), Vital::kForever);
  spawn("scheduler.intake", read_intake(), Vital::kForever);
  spawn("scheduler.registry", poll_registry(), Vital::kForever);
  spawn("scheduler.reap", reap(), Vital::kForever);
  spawn("scheduler.virtual_times", every_second(&LeaderTerm::store_virtual_times), Vital::kForever);
  if (keeps_history_) spawn("scheduler.history", every_second(&LeaderTerm::store_history), Vital::kForever);
  for (;;) {
    kicked_ = false;
    notice_reconnect();
    const auto since_audit_us = monotonic_us() - audited_us_;
    const auto period_us = hears() ? kAuditPeriodUs : kDeafAuditPeriodUs;
    if (!auditing_ && since_audit_us > audit_spacing_us_ &&
        (audit_wanted_ || scheduler_->wants_audit() || since_audit_us > period_us) &&
        context_.connection->connected()) {
      auditing_ = true;
      spawn("scheduler.audit", audit(), Vital::kOnce);
    }
    scheduler_->hold_deadlines(context_.held());
    const auto began = monotonic_us();
    auto actions = scheduler_->decide(now_us());
    if (!actions.empty()) {
      context_.metrics->decision(static_cast<double>(monotonic_us() - began) / 1e6);
      perform(std::move(actions));
    }
    if (kicked_) continue;
    wake_.expires_after(kTick);
    boost::system::error_code ignored;
    co_await wake_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  }
}

asio::awaitable<bool> LeaderTerm::rebuild() {
  generation_ = context_.connection->generation();
  if (!feed_) feed_ = std::make_unique<queue::Feed>(context_.connection, context_.client->options().shard, false);
  // Subscribes first: events that arrive while the state is read are applied after it.
  const auto subscribed = co_await feed_->next(0ms);
  if (!subscribed) co_return false;
  co_await mend();
  auto open = co_await context_.client->open_units(kCall);
  if (failed(open, "reading the open units")) co_return false;
  auto times = co_await context_.client->virtual_times(Deadline::after(kCall));
  if (failed(times, "reading the virtual times")) co_return false;
  auto workers = co_await context_.client->workers(Deadline::after(kCall));
  if (failed(workers, "reading the workers")) co_return false;
  update_adapters();
  // Redis may have been away, or all coordinators.
  // Without leases from before, one that lapses now is a lost worker's.
  const auto held = [](const queue::UnitView& unit) { return !unit.owner.empty(); };
  if (std::any_of(open->begin(), open->end(), held)) context_.client->hold_leases();
  scheduler_->rebuild(*open, *times, *workers, context_.client->hold_time().count(), now_us());
  log_fleet();
  for (const auto& view : *open) context_.metrics->track(view.ref.job, view.created_ms);
  if (keeps_history_) summaries_.restore(*open);
  stored_times_ = std::move(times).value();
  rewind_ = true;
  // An event may be older than what was read of its unit: an audit resolves that.
  audit_wanted_ = true;
  audited_us_ = monotonic_us();
  rebuilt_ = true;
  spdlog::info("scheduler: leading with epoch {}: {} open units, {} workers", epoch_, open->size(), workers->size());
  co_return true;
}

asio::awaitable<void> LeaderTerm::follow_feed() {
  for (;;) {
    auto batch = co_await feed_->next(1s);
    if (!batch) {
      co_await pause(kBackOff);
      continue;
    }
    if (batch->gap) {
      audit_wanted_ = missed_events_ = true;
      context_.metrics->on_gap();
    }
    const auto now = now_us();
    for (const auto& event : batch->events) {
      if (keeps_history_) note_for_history(event);
      context_.metrics->on_event(event, [&] { return scheduler_->class_of(event.job); });
      scheduler_->on_event(event, now);
      if (const auto lost = line_of_lost(event)) log_line(*lost);
    }
    if (!batch->events.empty() || batch->gap) kick();
  }
}

asio::awaitable<void> LeaderTerm::read_intake() {
  for (;;) {
    if (rewind_) {
      rewind_ = false;
      context_.client->rewind_intake();
    }
    auto entries = co_await context_.client->read_intake(kIntakeBatch, 500ms);
    if (!entries) {
      rewind_ = true;
      co_await pause(kBackOff);
      continue;
    }
    if (entries->empty()) continue;
    if (context_.options->adapters && std::any_of(entries->begin(), entries->end(), may_name_adapters)) {
      // The mirror must not be older than the submission.
      auto fresh = co_await context_.options->adapters->refresh(Deadline::after(kCall));
      if (!fresh) {
        rewind_ = true;
        co_await pause(kBackOff);
        continue;
      }
      update_adapters();
    }
    admitting_ += entries->size();
    scheduler_->hold_deadlines(context_.held());
    scheduler_->on_intake(*entries, now_us());
    kick();
    while (admitting_ > kMostAdmitting) co_await pause(1ms);
  }
}

void LeaderTerm::update_adapters() {
  if (!context_.options->adapters) return;
  const loras::RegistryMirror& mirror = *context_.options->adapters;
  if (!mirror.loaded() || mirror.version() == adapters_version_) return;
  adapters_version_ = mirror.version();
  Residency& residency = scheduler_->adapters();
  residency.forget_sizes();
  for (const auto& [sha256, bytes] : mirror.bytes()) residency.set_size(residency.intern(sha256), bytes);
  for (const auto& sha256 : pinned_) residency.pin(residency.intern(sha256), false);
  for (const auto& sha256 : mirror.pinned()) residency.pin(residency.intern(sha256), true);
  pinned_ = mirror.pinned();
}

asio::awaitable<void> LeaderTerm::poll_registry() {
  std::int64_t counted_us = 0;
  for (;;) {
    notice_reconnect();
    const auto asked_us = monotonic_us();
    const auto workers = co_await context_.client->workers(Deadline::after(kCall));
    if (!workers || monotonic_us() - asked_us > kSilenceUs) grant_grace();
    if (!failed(workers, "reading the workers")) {
      update_adapters();
      scheduler_->on_workers(*workers, now_us());
      log_fleet();
      kick();
    }
    if (const auto now = monotonic_us(); now - counted_us > 1'000'000) {
      counted_us = now;
      context_.metrics->stats(scheduler_->stats(), scheduler_->tenants());
    }
    co_await publish_forecast();
    if (outlook_due_.passed()) co_await publish_outlook();
    co_await pause(kRegistryPeriod);
  }
}

asio::awaitable<void> LeaderTerm::publish_forecast() {
  if (auto ends = scheduler_->ends_ms(); monotonic_us() - forecast_us_ < kForecastPeriodUs) {
    if (ends == forecast_.ends_ms) co_return;
    forecast_.ends_ms = std::move(ends);
  } else {
    const auto depth = co_await context_.client->depth(Deadline::after(kCall));
    if (!depth) co_return;
    const auto read = std::max(admitting_, scheduler_->pending_jobs());
    forecast_ = scheduler_->forecast(depth->queued_jobs - std::min(depth->queued_jobs, read), now_us());
    forecast_us_ = monotonic_us();
    context_.metrics->backlog(forecast_);
  }
  // A failure lets it expire.
  (void)co_await context_.client->publish(forecast_, Deadline::after(kCall));
}

asio::awaitable<void> LeaderTerm::publish_outlook() {
  const auto outlook = scheduler_->outlook(kMostOutlook, now_us());
  const auto period = co_await context_.client->publish(outlook, Deadline::after(kCall));
  outlook_due_ = Deadline::after(period ? *period : 1s);
}

void LeaderTerm::log_fleet() {
  for (const auto& line : fleet_log_.look(scheduler_->fleet(), now_us())) log_line(line);
}

asio::awaitable<void> LeaderTerm::reap() {
  for (;;) {
    co_await pause(kReapPeriod);
    if (!context_.connection->connected()) continue;
    const auto touched = co_await context_.client->reap(epoch_, 1000, Deadline::after(kCall), context_.held());
    if (!touched) note_failure(touched.error(), "reaping");
  }
}

asio::awaitable<void> LeaderTerm::every_second(asio::awaitable<void> (LeaderTerm::*store)(Deadline)) {
  for (;;) {
    co_await pause(1000ms);
    if (context_.connection->connected()) co_await (this->*store)(Deadline::after(kCall));
  }
}

asio::awaitable<void> LeaderTerm::store_virtual_times(Deadline deadline) {
  const auto times = scheduler_->virtual_times();
  std::map<std::string, std::optional<std::int64_t>> changed;
  for (const auto& [tenant, time] : times) {
    const auto it = stored_times_.find(tenant);
    if (it == stored_times_.end() || it->second != time) changed.emplace(tenant, time);
  }
  for (const auto& [tenant, time] : stored_times_) {
    if (!times.contains(tenant)) changed.emplace(tenant, std::nullopt);
  }
  if (changed.empty()) co_return;
  const auto stored = co_await context_.client->store_virtual_times(epoch_, changed, deadline);
  if (!failed(stored, "storing the virtual times")) stored_times_ = times;
}

void LeaderTerm::note_for_history(const queue::Event& event) {
  const auto ended = summaries_.apply(event);
  // The scheduler knows the job from its intake entry on.
  if (event.type == "ready" && event.fields.contains("class"))
    summaries_.set_adapter(event.job, scheduler_->first_adapter_of(event.job));
  if (!ended.job || history_.size() >= kMostUnstored) return;
  const queue::JobSummary& job = *ended.job;
  history_.push_back({.created_ms = job.created_ms,
                      .total_ms = job.ended_ms - job.created_ms,
                      .run_ms = job.run_ms,
                      .tenant = job.tenant,
                      .class_key = job.class_key,
                      .worker = job.worker,
                      .adapter = job.adapter,
                      .state = job.state,
                      .steps = job.steps,
                      .units = job.units,
                      .attempts = job.attempts});
}

asio::awaitable<void> LeaderTerm::store_history(Deadline deadline) {
  const auto jobs = std::exchange(history_, {});
  const std::int64_t now_ms = context_.held() ? 0 : now_us() / 1000;  // 0: none is too old
  for (std::size_t begin = 0; begin < jobs.size(); begin += kHistoryBatch) {
    const auto batch = std::span(jobs).subspan(begin, std::min(kHistoryBatch, jobs.size() - begin));
    const auto stored = co_await context_.client->append_history(batch, now_ms, deadline);
    // Statistics are not worth an audit, or recording a job twice.
    if (!stored)
      spdlog::debug("scheduler: {} jobs are missing in the history: {}", batch.size(), stored.error().message);
  }
}

asio::awaitable<void> LeaderTerm::mend() {
  const auto mended = co_await context_.client->mend(epoch_, kCall);
  if (failed(mended, "checking the open units")) co_return;
  if (mended->put_back > 0) {
    spdlog::warn(
        "scheduler: {} open units were in no set of their state or in two, as after a loss of data in Redis; "
        "put back",
        mended->put_back);
  }
  if (mended->unreadable > 0 && mended->unreadable != unreadable_) {
    spdlog::warn(
        "scheduler: {} open units have records that this version cannot read, and are left alone; start the "
        "version that wrote them",
        mended->unreadable);
  }
  unreadable_ = mended->unreadable;
}

asio::awaitable<void> LeaderTerm::audit() {
  audit_wanted_ = false;
  scheduler_->begin_audit();
  co_await mend();
  auto open = co_await context_.client->open_units(kCall);
  audited_us_ = monotonic_us();
  auditing_ = false;
  audit_spacing_us_ = open ? kAuditSpacingUs : std::min(2 * audit_spacing_us_, kMostAuditSpacingUs);
  if (failed(open, "reading the open units")) co_return;
  scheduler_->audit(*open, now_us());
  if (std::exchange(missed_events_, false) && keeps_history_) summaries_.restore(*open);
  context_.metrics->audited();
  kick();
}

void LeaderTerm::perform(Actions actions) {
  context_.metrics->revoked(actions.revoke.size() + actions.lost.size());
  // Redis runs an admission before the assignments of its units: they follow it on the same connection.
  if (!actions.admit.empty()) spawn("scheduler.admit", admit(std::move(actions.admit)), Vital::kOnce);
  if (!actions.reject.empty()) spawn("scheduler.reject", reject(std::move(actions.reject)), Vital::kOnce);
  if (!actions.revoke.empty()) spawn("scheduler.revoke", revoke(std::move(actions.revoke), false), Vital::kOnce);
  if (!actions.lost.empty()) spawn("scheduler.revoke", revoke(std::move(actions.lost), true), Vital::kOnce);
  for (auto& assignment : actions.assign) spawn("scheduler.assign", assign(std::move(assignment)), Vital::kOnce);
}

asio::awaitable<void> LeaderTerm::admit(std::vector<queue::Admission> admissions) {
  const auto done = co_await context_.client->admit(epoch_, admissions, Deadline::after(kCall));
  admitting_ -= std::min(admitting_, admissions.size());
  if (!failed(done, "admitting")) {
    over_memory_.reset();
    co_return;
  }
  if (done.error().code == Code::kResourceExhausted) {
    if (const auto more = over_memory_.admit())
      spdlog::warn("scheduler: Redis is at its memory limit; jobs wait in the intake{}", *more);
    co_await pause(1000ms);
  }
  rewind_ = true;
}

asio::awaitable<void> LeaderTerm::reject(std::vector<queue::Rejection> rejections) {
  const auto done = co_await context_.client->reject(epoch_, rejections, Deadline::after(kCall));
  admitting_ -= std::min(admitting_, rejections.size());
  if (failed(done, "rejecting")) rewind_ = true;
}

asio::awaitable<void> LeaderTerm::assign(Actions::Assignment assignment) {
  const auto done =
      co_await context_.client->assign(epoch_, assignment.owner, assignment.units, Deadline::after(kCall));
  if (failed(done, "assigning")) co_return;  // Redis may have assigned them: the audit tells
  for (std::size_t i = 0; i < assignment.units.size() && i < done->size(); ++i) {
    if ((*done)[i]) continue;
    context_.metrics->refused_assignment();
    scheduler_->on_assign_refused(assignment.units[i].ref, assignment.units[i].nonce, now_us());
    kick();
  }
}

asio::awaitable<void> LeaderTerm::revoke(std::vector<queue::Attempt> attempts, bool lost) {
  const auto done = co_await context_.client->revoke(epoch_, attempts, Deadline::after(kCall), lost);
  if (!done) note_failure(done.error(), "revoking");
}

}  // namespace ditfleet::scheduling
