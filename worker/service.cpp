#include "worker/service.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <cmath>
#include <utility>

#include "shared/core/host_name.h"
#include "shared/core/ids.h"
#include "shared/core/log_throttle.h"
#include "shared/telemetry/metrics.h"
#include "shared/telemetry/spans.h"
#include "worker/models/model_timings.h"

namespace ditfleet::worker {
namespace {

using namespace std::chrono_literals;

constexpr auto kCallTimeout = 2s;
constexpr auto kMailboxBlock = 1s;
constexpr auto kBackoffFirst = 100ms, kBackoffMax = 2000ms;
constexpr int kMailboxBatch = 64;
constexpr auto kStopGrace = 5s;   // after the drain time, for the current step to end
constexpr auto kFaultGrace = 2s;  // to report a failed device
constexpr auto kLeaveTimeout = 1s;
constexpr int kLoadFactor = 30;  // times worker.stuck_ms

// What the device and the host memory hold. As sets: every use changes the order, which is not worth a heartbeat.
std::array<std::set<std::string>, 3> residents(const queue::WorkerInfo& info) {
  std::set<std::string> absent;  // models whose weights are not on the device
  for (const auto& [name, memory] : info.memory) {
    if (!memory.resident) absent.insert(name);
  }
  return {std::set(info.adapters.begin(), info.adapters.end()),
          std::set(info.host_adapters.begin(), info.host_adapters.end()), std::move(absent)};
}

// In the heartbeat and in metrics.
void report_memory(const ModelSet& models, queue::WorkerInfo& info) {
  for (const auto& [name, model] : models.models) {
    const pipeline::MemoryReport report = model->memory();
    record_memory(name, report);
    queue::ModelMemory memory{.available_bytes = report.available_bytes,
                              .bytes = report.bytes,
                              .resident = report.resident,
                              .load_us = report.load_time.count()};
    for (const auto& limit : report.limits) memory.limits.push_back({limit.plan, limit.max_pixels});
    if (memory != queue::ModelMemory()) info.memory.emplace(name, std::move(memory));
  }
}

// Adds the components of a model that have quantized linears.
void report_quantized(const pipeline::ModelInfo& model, queue::WorkerInfo& info) {
  for (const auto& [component, formats] : model.linears) {
    std::string text;
    bool quantized = false;
    for (const auto& [format, count] : formats) {
      text += (text.empty() ? "" : ", ") + std::to_string(count) + " " + format;
      quantized = quantized || (format != "bf16" && format != "fp32");
    }
    if (quantized) info.quantized.push_back(model.name + "/" + component + ": " + text);
  }
}

}  // namespace

Service::Service(asio::io_context& io, ServiceOptions options, ServiceParts parts)
    : io_(io),
      options_(std::move(options)),
      parts_(std::move(parts)),
      boot_(new_nonce()),
      owner_(options_.name + ":" + boot_),
      started_ms_(
          std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
              .count()),
      table_(options_.capacity, options_.timing),
      watchdog_(options_.stuck, options_.gpus > 1),
      tasks_(io.get_executor()),
      wake_(io),
      renew_timer_(io),
      heartbeat_timer_(io),
      adapters_(io.get_executor(), parts_.adapters),
      runner_({.executor = io.get_executor(),
               .queue = *parts_.queue,
               .store = *parts_.store,
               .table = table_,
               .watchdog = watchdog_,
               .tasks = tasks_,
               .text = text_,
               .device = device_,
               .encode = encode_,
               .adapters = adapters_,
               .open_writer = parts_.open_writer,
               .checkpoint_interval = parts_.checkpoint_interval,
               .checkpoint_bytes = parts_.checkpoint_bytes,
               .carry_receipts = parts_.carry_receipts,
               .orphan = options_.timing.orphan,
               .energy_j = [this] { return energy_j(); },
               .residents_changed = [this] { report_residents(); },
               .table_changed = [this] { update(); },
               .fault = [this](const Error& error) { fail(error); }}) {}

Service::~Service() {
  for (NamedThread* thread : {&device_, &text_, &encode_}) thread->join();  // their work uses other members
}

std::optional<double> Service::energy_j() const {
  std::optional<double> sum;
  for (const auto& meter : meters_)
    if (const auto one = meter->energy_j()) sum = sum.value_or(0) + *one;
  return sum;
}

void Service::fail(const Error& error) {
  if (fatal_) return;
  fatal_ = error;
  if (models_.engine) models_.engine->abort_ranks();
  drain_until_ = Deadline::after(kFaultGrace);
  heartbeat_now();
  wake_.cancel();
}

asio::awaitable<int> Service::run() {
  parts_.connection->start();
  adapters_.start();
  tasks_.spawn("heartbeats", heartbeats(), Vital::kForever);
  loading_ = true;
  tasks_.spawn("load models", load_models(), Vital::kOnce);
  boost::system::error_code ignored;
  while (!finished()) {
    wake_.expires_at(drain_until_.time_point());
    co_await wake_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    if (state_ == State::kDraining && drain_until_.passed() && !finished()) {
      spdlog::warn("worker.drain_ms is over; handing back the running unit");
      drain_until_ = Deadline::after(kStopGrace);
      state_ = State::kStopping;
      table_.drain_running();
      update();
    }
  }
  co_await leave();
  if (fatal_) spdlog::error("stopped: {}", fatal_->message);
  co_return fatal_ ? 1 : 0;
}

bool Service::finished() const {
  if (quitting_) return true;
  if (fatal_) return runner_.idle() || drain_until_.passed();
  if (state_ == State::kDraining) return table_.empty() && runner_.idle();
  return state_ == State::kStopping && ((table_.empty() && runner_.idle()) || drain_until_.passed());
}

void Service::drain() { begin_drain(Deadline::after(options_.drain)); }

void Service::begin_drain(Deadline limit) {
  if (state_ == State::kStopping || (state_ == State::kDraining && drain_until_.time_point() <= limit.time_point()))
    return;
  spdlog::info("draining with {} units", table_.attempts().size());
  // Loading and warm-up cannot be interrupted, and there is no unit to finish.
  if (loading_) quitting_ = true;
  state_ = State::kDraining;
  drain_until_ = limit;
  table_.drain();
  heartbeat_now();
  update();
}

// Running units get no time limit: an administrator can wait, unlike an init system that sends SIGTERM.
void Service::apply_desired() {
  if (desired_ == queue::Desired::kStopped) {
    begin_drain(Deadline::never());
  } else if (desired_ == queue::Desired::kDraining && state_ == State::kReady) {
    spdlog::info("drained by an administrator with {} units; `ditfleet workers resume {}` ends this",
                 table_.attempts().size(), options_.name);
    state_ = State::kCordoned;
    table_.drain();
    heartbeat_now();
    update();
  } else if (desired_ == queue::Desired::kReady && state_ == State::kCordoned) {
    spdlog::info("resumed by an administrator");
    state_ = State::kReady;
    table_.resume();
    heartbeat_now();
  }
}

void Service::quit() {
  quitting_ = true;
  wake_.cancel();
}

void Service::perform_actions() {
  if (fatal_) return;  // a failed device gets no more work
  for (const Action& action : table_.decide(Clock::now())) runner_.perform(action);
}

void Service::update() {
  perform_actions();
  // Reports the units at once, so that clients can see where a job runs.
  if (table_.refs() != reported_units_) heartbeat_now();
  renew_timer_.cancel();
  wake_.cancel();
}

void Service::heartbeat_now() {
  heartbeat_pending_ = true;
  heartbeat_timer_.cancel();
}

asio::awaitable<void> Service::load_models() {
  using Loaded = std::pair<ModelSet, std::vector<std::string>>;
  tasks_.spawn("watch loading", watch_loading(), Vital::kOnce);
  const std::function<Result<std::shared_ptr<Loaded>>()> work = [this]() -> Result<std::shared_ptr<Loaded>> {
    auto loaded = std::make_shared<Loaded>();
    // A trace of its own, since it belongs to no job.
    const auto context = telemetry::SpanContext::fresh();
    auto start = telemetry::SpanTimer::of("worker_start", context, {}, telemetry::SpanKind::kInternal);
    start.attribute("ditfleet.worker", options_.name);
    const telemetry::ContextScope scope(context);
    {
      const telemetry::ScopedSpan span("load_models");
      auto set = parts_.load();
      if (!set) return set.error();
      loaded->first = std::move(*set);
      record_boot("models");
    }
    if (options_.warmup) {
      const telemetry::ScopedSpan span("warm_up");
      auto warm = warm_up(loaded->first, parts_.open_writer);
      if (!warm) return warm.error();
      loaded->second = std::move(*warm);
    }
    return loaded;
  };
  auto loaded = co_await device_.run<std::shared_ptr<Loaded>>(work, Deadline::never());
  loading_ = false;
  if (!loaded) {
    if (!fatal_) fatal_ = loaded.error();
    wake_.cancel();
    co_return;
  }
  models_ = std::move((*loaded)->first);
  for (int gpu = 0; gpu < options_.gpus; ++gpu)
    if (auto meter = GpuMeter::open(models_.device, gpu)) meters_.push_back(std::move(meter));
  runner_.set_warm_classes(std::move((*loaded)->second));
  if (quitting_ || state_ != State::kStarting) co_return;
  state_ = State::kReady;
  record_boot("ready");
  spdlog::info("ready: worker '{}' on {} ({}), {}, {} models", options_.name, models_.device, models_.device_name,
               models_.precision, models_.models.size());
  apply_desired();
  heartbeat_now();
  tasks_.spawn("mailbox", mailbox(), Vital::kForever);
  tasks_.spawn("renewals", renewals(), Vital::kForever);
  tasks_.spawn("watchdog", watch_progress(), Vital::kForever);
  if (adapters_.takes_adapters())
    tasks_.spawn("watch adapters", adapters_.watch(models_, [this] { report_residents(); }), Vital::kForever);
}

void Service::report_residents() {
  queue::WorkerInfo info;
  adapters_.describe(models_, info);
  report_memory(models_, info);
  if (residents(info) != reported_residents_) heartbeat_now();
}

asio::awaitable<Result<std::string>> Service::send_heartbeat() {
  queue::WorkerInfo info;
  info.name = options_.name;
  info.boot = boot_;
  info.host = host_name();
  info.pid = static_cast<int>(::getpid());
  info.state = fatal_                       ? "stuck"
               : state_ == State::kStarting ? "starting"
               : state_ == State::kReady    ? "ready"
                                            : "draining";
  info.device = models_.device;
  info.device_name = models_.device_name;
  info.precision = models_.precision;
  info.gpus = options_.gpus;
  for (const auto& [name, model] : models_.models) {
    info.models.push_back(name);
    report_quantized(model->info(), info);
  }
  if (loading_) {
    info.models = options_.models;
    info.adapter_slots = options_.adapter_slots;
  }
  info.warm_classes = runner_.warm_classes();
  info.capacity = options_.capacity;
  info.started_ms = started_ms_;
  info.version = options_.version;
  info.units = reported_units_ = table_.refs();
  adapters_.describe(models_, info);
  report_memory(models_, info);
  static const telemetry::Counters compiles("ditfleet_region_compiles_total"), lookups("ditfleet_lora_loads_total");
  info.compiles = std::llround(compiles.total());
  for (const char* tier : {"host", "disk", "source"}) info.adapter_swaps += std::llround(lookups({tier, "ok"}).Value());
  for (const auto& meter : meters_) meter->record();
  reported_residents_ = residents(info);
  co_return co_await parts_.queue->heartbeat(info, Deadline::after(kCallTimeout));
}

void Service::note_readiness(bool registered) {
  why_not_ready_ = fatal_                       ? "the device failed"
                   : loading_                   ? "loading the models"
                   : state_ == State::kCordoned ? "drained by an administrator"
                   : state_ != State::kReady    ? "draining"
                   : !registered                ? "Redis does not answer"
                                                : "";
  if (why_not_ready().empty() && parts_.on_ready) std::exchange(parts_.on_ready, {})();
}

// The first heartbeat registers this worker, as does the first after Redis has restarted.
asio::awaitable<void> Service::heartbeats() {
  std::optional<std::uint64_t> registered;
  bool logged_failure = false, logged_duplicate = false;
  while (true) {
    heartbeat_pending_ = false;
    Result<void> sent;
    if (registered != parts_.connection->generation())
      sent = co_await parts_.queue->load_library(Deadline::after(kCallTimeout));
    if (sent) {
      const auto before = co_await send_heartbeat();
      if (!before) {
        sent = before.error();
      } else if (registered && !logged_duplicate && state_ == State::kReady && !before->empty() && *before != boot_) {
        // The other process has registered after this one, so it is alive: the two keep displacing each other.
        logged_duplicate = true;
        spdlog::error(
            "another worker has the name '{}' too (run id {}), so both lose units to each other; give every worker "
            "a unique worker.name",
            options_.name, *before);
      }
    }
    if (tasks_.stopping()) co_return;
    note_readiness(sent.ok());
    if (sent) {
      const auto generation = parts_.connection->generation();
      if (registered != generation) spdlog::info("registered as '{}'", owner_);
      registered = generation;
      logged_failure = false;
      // After a failure the next heartbeat reads it.
      if (const auto desired = co_await parts_.queue->desired(options_.name, boot_, Deadline::after(kCallTimeout))) {
        desired_ = *desired;
        apply_desired();
      }
      if (tasks_.stopping()) co_return;
    } else if (!logged_failure) {
      spdlog::warn("cannot register: {}; retrying", sent.error().message);
      logged_failure = true;
    }
    if (heartbeat_pending_ && sent) continue;
    heartbeat_timer_.expires_after(sent ? options_.heartbeat
                                        : std::min<std::chrono::milliseconds>(options_.heartbeat, 250ms));
    boost::system::error_code ignored;
    co_await heartbeat_timer_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    if (tasks_.stopping()) co_return;
  }
}

asio::awaitable<void> Service::mailbox() {
  std::string after = "0";
  std::uint64_t generation = parts_.connection->generation();
  auto backoff = std::chrono::milliseconds(kBackoffFirst);
  while (!tasks_.stopping()) {
    auto entries = co_await parts_.queue->read_mailbox(owner_, after, kMailboxBatch, kMailboxBlock);
    if (!entries) {
      asio::steady_timer timer(io_, backoff);
      co_await timer.async_wait(asio::use_awaitable);
      backoff = std::min<std::chrono::milliseconds>(backoff * 2, kBackoffMax);
      continue;
    }
    backoff = kBackoffFirst;
    std::vector<std::string> ids;
    for (auto& entry : *entries) {
      after = entry.entry_id;
      ids.push_back(entry.entry_id);
      receive(std::move(entry));
    }
    if (!ids.empty()) {
      update();
      // A failure is harmless: a message that is read again has a known nonce, or its start is refused.
      (void)co_await parts_.queue->acknowledge(owner_, ids, Deadline::after(kCallTimeout));
    }
    // A restarted Redis may have lost the end of the stream: read it again from the start.
    if (generation != parts_.connection->generation()) {
      generation = parts_.connection->generation();
      after = "0";
    }
  }
}

void Service::receive(queue::MailboxEntry entry) {
  switch (entry.kind) {
    case queue::MailboxEntry::Kind::kAssign: runner_.assign(std::move(entry), models_); return;
    case queue::MailboxEntry::Kind::kRevoke: table_.revoke(entry.nonce); return;
    case queue::MailboxEntry::Kind::kPause: table_.pause(entry.nonce); return;
    case queue::MailboxEntry::Kind::kCancel: table_.cancel(entry.nonce); return;
    case queue::MailboxEntry::Kind::kDesired: heartbeat_now(); return;
  }
}

asio::awaitable<void> Service::renewals() {
  LogThrottle renewal_log;
  while (!tasks_.stopping()) {
    const auto sent = Clock::now();
    const auto due = table_.due_renewals(sent);
    if (!due.empty()) {
      // A third of the lease, so that a call that hangs leaves time for another.
      auto outcomes = co_await parts_.queue->renew(due, Deadline::at(sent + options_.lease / 3));
      if (outcomes) {
        renewal_log.reset();
        table_.renewed(due, *outcomes, sent);
      } else {
        if (const auto more = renewal_log.admit()) {
          spdlog::warn("cannot renew the leases of {} units: {}{}", due.size(), outcomes.error().message, *more);
        }
        table_.renewal_failed(due, Clock::now());
      }
    }
    perform_actions();
    renew_timer_.expires_at(table_.next_wakeup());
    boost::system::error_code ignored;
    co_await renew_timer_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  }
}

// A file system or driver may hang, here or in another rank.
asio::awaitable<void> Service::watch_loading() {
  const auto limit = kLoadFactor * options_.stuck;
  asio::steady_timer timer(io_, limit);
  co_await timer.async_wait(asio::use_awaitable);
  if (loading_)
    fail(
        unavailable(fmt::format("loading and warming up the models has not ended within {} s; if they take that long, "
                                "raise worker.stuck_ms (now {}; the limit is {} times that)",
                                limit.count() / 1000, options_.stuck.count(), kLoadFactor)));
}

asio::awaitable<void> Service::watch_progress() {
  asio::steady_timer timer(io_);
  while (!tasks_.stopping()) {
    timer.expires_after(watchdog_.interval());
    co_await timer.async_wait(asio::use_awaitable);
    if (const auto stuck = watchdog_.check(Clock::now()); stuck && !fatal_) runner_.fail_stuck(*stuck);
  }
}

asio::awaitable<void> Service::leave() {
  const auto held = table_.attempts();
  if (!held.empty()) {
    auto handed = co_await parts_.queue->hand_back(held, Deadline::after(kLeaveTimeout));
    if (handed)
      spdlog::info("handed back {} units", held.size());
    else
      spdlog::warn("could not hand back {} units: {}", held.size(), handed.error().message);
  }
  tasks_.stop();
  auto gone = co_await parts_.queue->deregister(options_.name, boot_, Deadline::after(kLeaveTimeout));
  if (!gone) spdlog::warn("could not deregister: {}", gone.error().message);
  // Does not wait for work that cannot be interrupted.
  if (!busy() && runner_.idle()) co_await tasks_.join();
  parts_.connection->stop();
  adapters_.stop();
}

}  // namespace ditfleet::worker
