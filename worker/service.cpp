#include "worker/service.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "shared/core/host_name.h"
#include "shared/core/ids.h"
#include "shared/core/log_throttle.h"
#include "shared/telemetry/spans.h"

namespace ditfleet::worker {
namespace {

using namespace std::chrono_literals;

constexpr auto kCallTimeout = 2s;
constexpr auto kMailboxBlock = 1s;
constexpr auto kBackoffFirst = 100ms, kBackoffMax = 2000ms;
constexpr int kMailboxBatch = 64;
constexpr auto kStopGrace = 5s;   // for a step to end once it was told to, after the drain time
constexpr auto kFaultGrace = 2s;  // to report a failed device
constexpr auto kGoodbye = 1s;

// What is used comes to the front, and that is no news.
std::pair<std::vector<std::string>, std::vector<std::string>> sorted_adapters(const queue::WorkerInfo& info) {
  std::pair<std::vector<std::string>, std::vector<std::string>> out(info.adapters, info.host_adapters);
  std::sort(out.first.begin(), out.first.end());
  std::sort(out.second.begin(), out.second.end());
  return out;
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
      holdings_(options_.capacity, options_.timing),
      tasks_(io.get_executor()),
      wake_(io),
      renew_timer_(io),
      heartbeat_timer_(io),
      adapters_(io.get_executor(), parts_.adapters),
      runner_({.executor = io.get_executor(),
               .queue = *parts_.queue,
               .store = *parts_.store,
               .holdings = holdings_,
               .tasks = tasks_,
               .text = text_,
               .device = device_,
               .encode = encode_,
               .adapters = adapters_,
               .encode_image = parts_.encode_image,
               .adapters_moved = [this] { tell_adapters(); },
               .changed = [this] { pump(); },
               .fault =
                   [this](const Error& error) {
                     fatal_ = error;
                     drain_until_ = Clock::now() + kFaultGrace;
                     wake_.cancel();
                   }}) {}

Service::~Service() = default;

asio::awaitable<int> Service::run() {
  parts_.connection->start();
  adapters_.start();
  tasks_.spawn("heartbeats", heartbeats());
  loading_ = true;
  tasks_.spawn("loading the models", load_models());
  boost::system::error_code ignored;
  while (!finished()) {
    wake_.expires_at(drain_until_.value_or(Clock::time_point::max()));
    co_await wake_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    if (state_ == "draining" && drain_until_ && Clock::now() >= *drain_until_ && !finished()) {
      spdlog::warn("the drain time is over: handing back what still runs");
      drain_until_ = Clock::now() + kStopGrace;
      state_ = "stopping";
      holdings_.drain_running();
      pump();
    }
  }
  co_await say_goodbye();
  if (fatal_) spdlog::error("ends because {}", fatal_->message);
  co_return fatal_ ? 1 : 0;
}

bool Service::finished() const {
  if (quitting_) return true;
  const bool late = drain_until_ && Clock::now() >= *drain_until_;
  if (fatal_) return runner_.idle() || late;
  if (state_ == "draining") return holdings_.empty() && runner_.idle();
  return state_ == "stopping" && ((holdings_.empty() && runner_.idle()) || late);
}

void Service::drain() {
  if (state_ == "draining" || state_ == "stopping") return;
  spdlog::info("draining: {} units held", holdings_.attempts().size());
  // What loads or warms up cannot be interrupted and has nothing to finish.
  if (loading_) quitting_ = true;
  state_ = "draining";
  drain_until_ = Clock::now() + options_.drain;
  holdings_.drain();
  beat_soon();
  pump();
}

void Service::quit() {
  quitting_ = true;
  wake_.cancel();
}

void Service::act() {
  if (fatal_) return;  // nothing is begun on a device that failed
  for (const Action& action : holdings_.decide(Clock::now())) runner_.perform(action);
}

void Service::pump() {
  act();
  // Whoever asks which worker a job runs on need not wait for the next heartbeat.
  if (holdings_.refs() != told_units_) beat_soon();
  renew_timer_.cancel();
  if (drain_until_) wake_.cancel();
}

void Service::beat_soon() {
  beat_again_ = true;
  heartbeat_timer_.cancel();
}

asio::awaitable<void> Service::load_models() {
  using Loaded = std::pair<ModelSet, std::vector<std::string>>;
  const std::function<Result<std::shared_ptr<Loaded>>()> work = [this]() -> Result<std::shared_ptr<Loaded>> {
    auto loaded = std::make_shared<Loaded>();
    // No job's: a trace of its own.
    const auto context = telemetry::SpanContext::fresh();
    auto start = telemetry::SpanTimer::of("worker_start", context, {}, telemetry::SpanKind::kInternal);
    start.attribute("ditfleet.worker", options_.name);
    const telemetry::ContextScope scope(context);
    {
      const telemetry::ScopedSpan span("load_models");
      auto set = parts_.load();
      if (!set) return set.error();
      loaded->first = std::move(*set);
    }
    if (options_.warmup) {
      const telemetry::ScopedSpan span("warm_up");
      auto warm = warm_up(loaded->first, parts_.encode_image);
      if (!warm) return warm.error();
      loaded->second = std::move(*warm);
    }
    return loaded;
  };
  auto loaded = co_await device_.run<std::shared_ptr<Loaded>>(work, Deadline::never());
  loading_ = false;
  if (!loaded) {
    fatal_ = loaded.error();
    wake_.cancel();
    co_return;
  }
  models_ = std::move((*loaded)->first);
  runner_.set_warm_classes(std::move((*loaded)->second));
  if (quitting_ || state_ != "starting") co_return;
  state_ = "ready";
  spdlog::info("ready: worker '{}' on {} ({}), {}, {} models", options_.name, models_.device, models_.device_name,
               models_.precision, models_.models.size());
  beat_soon();
  tasks_.spawn("mailbox", mailbox());
  tasks_.spawn("renewals", renewals());
  tasks_.spawn("deleted adapters", adapters_.watch(models_, [this] { tell_adapters(); }));
}

void Service::tell_adapters() {
  queue::WorkerInfo info;
  adapters_.describe(models_, info);
  if (sorted_adapters(info) != told_adapters_) beat_soon();
}

asio::awaitable<Result<std::string>> Service::beat() {
  queue::WorkerInfo info;
  info.name = options_.name;
  info.boot = boot_;
  info.host = host_name();
  info.pid = static_cast<int>(::getpid());
  info.state = state_ == "stopping" ? "draining" : state_;
  info.device = models_.device;
  info.device_name = models_.device_name;
  info.precision = models_.precision;
  for (const auto& [name, model] : models_.models) info.models.push_back(name);
  if (loading_) {
    info.models = options_.models;
    info.adapter_slots = options_.adapter_slots;
  }
  info.warm_classes = runner_.warm_classes();
  info.capacity = options_.capacity;
  info.started_ms = started_ms_;
  info.version = options_.version;
  info.units = told_units_ = holdings_.refs();
  adapters_.describe(models_, info);
  told_adapters_ = sorted_adapters(info);
  co_return co_await parts_.queue->heartbeat(info, Deadline::after(kCallTimeout));
}

// Also what registers this worker, at first and after Redis came back.
asio::awaitable<void> Service::heartbeats() {
  std::optional<std::uint64_t> greeted;
  bool told_away = false, told_twin = false;
  while (true) {
    beat_again_ = false;
    Result<void> sent;
    if (greeted != parts_.connection->generation())
      sent = co_await parts_.queue->load_library(Deadline::after(kCallTimeout));
    if (sent) {
      const auto before = co_await beat();
      if (!before) {
        sent = before.error();
      } else if (greeted && !told_twin && state_ == "ready" && !before->empty() && *before != boot_) {
        // It took the name after this one did: it lives, and each displaces the other again and again.
        told_twin = true;
        spdlog::error(
            "another worker calls itself '{}', too (boot {}): units go back and forth between them; give each its own "
            "worker.name",
            options_.name, *before);
      }
    }
    if (tasks_.stopping()) co_return;
    if (sent) {
      const auto generation = parts_.connection->generation();
      if (greeted != generation) spdlog::info("registered as '{}'", owner_);
      greeted = generation;
      told_away = false;
    } else if (!told_away) {
      spdlog::warn("cannot register: {}; trying on", sent.error().message);
      told_away = true;
    }
    if (beat_again_ && sent) continue;
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
      pump();
      auto acknowledged = co_await parts_.queue->acknowledge(owner_, ids, Deadline::after(kCallTimeout));
      (void)acknowledged;  // what stays there is known by its nonce, or its start is refused
    }
    // A Redis that came back may have lost the end of the stream: what is still there is what counts.
    if (generation != parts_.connection->generation()) {
      generation = parts_.connection->generation();
      after = "0";
    }
  }
}

void Service::receive(queue::MailboxEntry entry) {
  switch (entry.kind) {
    case queue::MailboxEntry::Kind::kAssign: runner_.assign(std::move(entry), models_); return;
    case queue::MailboxEntry::Kind::kRevoke: holdings_.revoke(entry.nonce); return;
    case queue::MailboxEntry::Kind::kCancel: holdings_.cancel(entry.nonce); return;
  }
}

asio::awaitable<void> Service::renewals() {
  LogThrottle cannot_renew;
  while (!tasks_.stopping()) {
    const auto sent = Clock::now();
    const auto due = holdings_.due_renewals(sent);
    if (!due.empty()) {
      // Short of the lease, so that a call that hangs leaves time for another.
      auto outcomes = co_await parts_.queue->renew(due, Deadline::at(sent + options_.timing.lease / 3));
      if (outcomes) {
        cannot_renew.reset();
        holdings_.renewed(due, *outcomes, sent);
      } else {
        if (const auto more = cannot_renew.admit()) {
          spdlog::warn("cannot renew the leases of {} units: {}{}", due.size(), outcomes.error().message, *more);
        }
        holdings_.renewal_failed(due, Clock::now());
      }
      runner_.publish_leases();
    }
    act();
    renew_timer_.expires_at(holdings_.next_wakeup());
    boost::system::error_code ignored;
    co_await renew_timer_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  }
}

asio::awaitable<void> Service::say_goodbye() {
  const auto held = holdings_.attempts();
  if (!held.empty()) {
    auto handed = co_await parts_.queue->hand_back(held, Deadline::after(kGoodbye));
    spdlog::info("handed back {} units: {}", held.size(), handed ? "done" : handed.error().message);
  }
  tasks_.stop();
  auto gone = co_await parts_.queue->deregister(options_.name, boot_, Deadline::after(kGoodbye));
  if (!gone) spdlog::warn("could not deregister: {}", gone.error().message);
  // Work that a thread still has in hand is not waited for (busy()).
  if (!busy()) co_await tasks_.join();
  parts_.connection->stop();
  adapters_.stop();
}

}  // namespace ditfleet::worker
