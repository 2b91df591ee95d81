#include "coordinator/gateway/webhooks/deliverer.h"

#include <fmt/chrono.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "coordinator/gateway/webhooks/address.h"
#include "coordinator/gateway/webhooks/signature.h"
#include "shared/core/excerpt.h"
#include "shared/core/wall_clock.h"
#include "shared/job/spec_json.h"
#include "shared/telemetry/metrics.h"

namespace ditfleet::gateway {
namespace {

using namespace std::chrono_literals;

constexpr auto kTurn = 200ms;
constexpr int kPage = 100;                                             // entries of the outbox per turn
constexpr int kMostRunning = 256, kMostOfTenant = 32, kMostOfOne = 8;  // requests, of all, a tenant's, a receiver's
constexpr std::size_t kMostWaiting = 100, kMostWaitingOfAll = 2000;    // whose bodies are in memory, of one receiver
constexpr int kFailuresToRest = 3;
constexpr std::int64_t kLongestPauseMs = 3'600'000, kProgressMs = 1000;
constexpr long kGone = 410;  // the receiver wants no more of it (Standard Webhooks)

void count(const char* result) {
  static const telemetry::Counters total("ditfleet_webhook_deliveries_total");
  total({result}).Increment();
}

std::string body_of(const std::string& type, std::int64_t at_ms, json::object job) {
  const std::string time = fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z", fmt::gmtime(at_ms / 1000), at_ms % 1000);
  return json::serialize(json::object{{"type", type}, {"timestamp", time}, {"data", std::move(job)}});
}

std::int64_t entry_ms(const std::string& entry) { return std::strtoll(entry.c_str(), nullptr, 10); }

}  // namespace

Deliverer::Deliverer(asio::any_io_executor executor, std::shared_ptr<redis::Connection> redis, int shard,
                     const config::Settings& settings, Source source)
    : executor_(executor),
      redis_(redis),
      store_(std::move(redis), shard),
      settings_(settings),
      source_(std::move(source)),
      client_({.thread = "webhooks", .may_connect = settings.webhooks.allow_private ? nullptr : &is_public_address}),
      tasks_(executor),
      random_(static_cast<unsigned>(unix_ms())) {}

Deliverer::~Deliverer() = default;

asio::awaitable<void> Deliverer::run() {
  asio::steady_timer timer(executor_);
  for (;;) {
    const bool more = co_await turn();
    timer.expires_after(more ? 0ms : kTurn);
    co_await timer.async_wait(asio::use_awaitable);
  }
}

asio::awaitable<void> Deliverer::stop() {
  tasks_.stop();
  co_await tasks_.join();
}

void Deliverer::forget_all() {
  endpoints_.clear();
  progress_.clear();
  cursor_ = "0-0";
  loaded_ = false;
}

asio::awaitable<bool> Deliverer::turn() {
  if (!source_.leads() || !redis_->connected()) {
    forget_all();
    co_return false;
  }
  if (redis_->generation() != std::exchange(generation_, redis_->generation())) forget_all();
  if (!loaded_ && !co_await load()) co_return false;
  const bool more = co_await read_outbox();
  co_await report_progress();
  static const telemetry::Gauges pending("ditfleet_webhook_deliveries_waiting");
  waiting_ = 0;
  for (auto at = endpoints_.begin(); at != endpoints_.end();) {
    start_due(at->second);
    waiting_ += at->second->waiting.size();
    const bool idle = at->second->waiting.empty() && at->second->running == 0;
    at = idle ? endpoints_.erase(at) : std::next(at);
  }
  pending({}).Set(static_cast<double>(waiting_));
  co_return more;
}

asio::awaitable<bool> Deliverer::load() {
  forget_all();
  auto stored = co_await store_.list("");
  if (!stored) co_return false;
  for (Delivery& delivery : *stored)
    if (!delivery.dead) add(std::make_shared<Waiting>(Waiting{.delivery = std::move(delivery), .entry = {}}));
  loaded_ = true;
  co_return true;
}

std::shared_ptr<Deliverer::Endpoint> Deliverer::endpoint_of(const Delivery& delivery) {
  auto& endpoint = endpoints_[delivery.tenant + " " + delivery.url];
  if (!endpoint) endpoint = std::make_shared<Endpoint>();
  return endpoint;
}

void Deliverer::add(std::shared_ptr<Waiting> waiting) {
  const auto due_ms = waiting->delivery.due_ms;
  endpoint_of(waiting->delivery)->waiting.emplace(due_ms, std::move(waiting));
}

asio::awaitable<bool> Deliverer::read_outbox() {
  auto changes = co_await store_.changes(cursor_, kPage);
  if (!changes) co_return false;
  for (DeliveryStore::Change& change : *changes) {
    const std::string entry = change.entry;
    if (!co_await take(std::move(change))) {
      loaded_ = false;
      co_return false;
    }
    cursor_ = entry;
  }
  co_return changes->size() == kPage;
}

// False: Redis did not answer.
asio::awaitable<bool> Deliverer::take(DeliveryStore::Change change) {
  auto waiting = std::make_shared<Waiting>();
  Delivery& delivery = waiting->delivery;
  if (change.change == "replay") {
    auto stored = co_await store_.get(change.job);
    if (!stored && stored.error().code != Code::kNotFound && stored.error().code != Code::kDataCorrupt) co_return false;
    if (stored && !stored->dead) {
      delivery = std::move(*stored);
      add(std::move(waiting));
    }
    co_return (co_await store_.forget(change.entry)).ok();
  }
  auto record = co_await source_.job(change.job);
  if (!record && record.error().code != Code::kNotFound) co_return false;
  auto spec = record ? job::parse_spec(std::string_view(record->spec)) : Result<job::JobSpec>(record.error());
  const std::string type = "job." + change.change;
  if (!spec || spec->webhook.url.empty() || !spec->webhook.wants(type))
    co_return (co_await store_.forget(change.entry)).ok();
  const std::int64_t at_ms = entry_ms(change.entry);
  delivery = {.id = change.job + "." + change.change,
              .tenant = record->tenant,
              .url = spec->webhook.url,
              .type = type,
              .job = change.job};
  delivery.first_ms = delivery.due_ms = at_ms;
  delivery.body = body_of(type, at_ms, co_await source_.describe(*record));
  waiting->entry = change.entry;
  const auto endpoint = endpoint_of(delivery);
  const bool rests = endpoint->failures >= kFailuresToRest;
  const bool many = endpoint->waiting.size() >= kMostWaiting || waiting_ >= kMostWaitingOfAll;
  if ((rests || many) && !co_await store(*waiting)) co_return false;
  add(waiting);
  if (!rests) start_due(endpoint);
  co_return true;
}

// Stores it for a retry, and frees the memory of its body.
asio::awaitable<bool> Deliverer::store(Waiting& waiting) {
  if (auto done = co_await store_.put(waiting.delivery); !done) co_return false;
  waiting.delivery.body.clear();
  const std::string entry = std::exchange(waiting.entry, {});
  co_return entry.empty() || (co_await store_.forget(entry)).ok();
}

asio::awaitable<void> Deliverer::report_progress() {
  if (unix_ms() < progress_due_ms_) co_return;
  progress_due_ms_ = unix_ms() + kProgressMs;
  const auto watched = co_await store_.watched();
  if (!watched) co_return;
  std::map<std::string, double> reported;
  for (const std::string& id : *watched) {
    auto record = co_await source_.job(id);
    if (!record || job::is_terminal(record->state)) continue;
    auto spec = job::parse_spec(std::string_view(record->spec));
    if (!spec || spec->webhook.url.empty()) continue;
    json::object job = co_await source_.describe(*record);
    const json::value* value = job.if_contains("progress");
    const double progress = value && value->is_double() ? value->get_double() : 0;
    reported[id] = progress;
    const auto before = progress_.find(id);
    if (progress <= 0 || (before != progress_.end() && before->second == progress)) continue;
    auto waiting = std::make_shared<Waiting>();
    const std::int64_t now = unix_ms();
    waiting->keeps = false;
    waiting->delivery = {.id = id + ".progress." + std::to_string(now),
                         .tenant = record->tenant,
                         .url = spec->webhook.url,
                         .type = "job.progress",
                         .job = id};
    waiting->delivery.first_ms = waiting->delivery.due_ms = now;
    waiting->delivery.body = body_of("job.progress", now, std::move(job));
    const auto endpoint = endpoint_of(waiting->delivery);
    if (endpoint->failures < kFailuresToRest && endpoint->waiting.size() < kMostWaiting) add(std::move(waiting));
  }
  progress_ = std::move(reported);
}

void Deliverer::start_due(const std::shared_ptr<Endpoint>& endpoint) {
  const std::int64_t now = unix_ms();
  const int most = endpoint->failures >= kFailuresToRest ? 1 : kMostOfOne;  // one, to see whether it is back
  while (!endpoint->waiting.empty() && endpoint->waiting.begin()->first <= now && endpoint->rests_until_ms <= now &&
         endpoint->running < most && running_ < kMostRunning) {
    int& of_tenant = running_of_[endpoint->waiting.begin()->second->delivery.tenant];
    if (of_tenant >= kMostOfTenant) return;
    auto waiting = std::move(endpoint->waiting.extract(endpoint->waiting.begin()).mapped());
    ++of_tenant;
    ++endpoint->running;
    ++running_;
    tasks_.spawn("webhook", send(endpoint, std::move(waiting)));
  }
}

asio::awaitable<void> Deliverer::send(std::shared_ptr<Endpoint> endpoint, std::shared_ptr<Waiting> waiting) {
  const std::shared_ptr<void> ended(nullptr, [&, tenant = waiting->delivery.tenant](void*) {
    if (--running_of_[tenant] == 0) running_of_.erase(tenant);
    --endpoint->running;
    --running_;
  });
  Delivery& delivery = waiting->delivery;
  if (delivery.body.empty()) {
    auto stored = co_await store_.get(delivery.id);
    if (!stored && stored.error().code == Code::kNotFound) co_return;  // delivered meanwhile
    if (!stored) {
      loaded_ = false;
      co_return;
    }
    delivery = std::move(*stored);
  }
  const auto secrets = co_await store_.secrets(delivery.tenant);
  if (!secrets) {
    loaded_ = false;
    co_return;
  }
  const std::string hosts = config::webhooks_of(settings_, delivery.tenant).hosts;
  HttpClient::Answer answer;
  if (is_listed_host(delivery.url, hosts)) {
    // Outside the co_await, because GCC 12 evaluates both branches of a conditional inside one.
    auto attempting = attempt(delivery, *secrets);
    answer = co_await std::move(attempting);
  } else {
    answer.error = "its host is not one of webhooks.hosts: " + hosts;
  }
  co_await conclude(endpoint, waiting, std::move(answer));
}

asio::awaitable<HttpClient::Answer> Deliverer::attempt(const Delivery& delivery, std::vector<std::string> secrets) {
  const std::int64_t seconds = unix_ms() / 1000;
  HttpClient::Request request{
      .method = "POST",
      .url = delivery.url,
      .headers = {"Content-Type: application/json", "webhook-id: " + delivery.id,
                  "webhook-timestamp: " + std::to_string(seconds),
                  "webhook-signature: " + webhook_signature(secrets, delivery.id, seconds, delivery.body)},
      .body = std::make_shared<std::string>(delivery.body),
      .timeout = std::chrono::milliseconds(settings_.webhooks.timeout_ms),
      .proxy = false};
  auto answer = co_await client_.send(std::move(request));
  if (answer.refused)
    answer.error = "'" + host_of(delivery.url) +
                   "' has an address that is not public; use a public one, or set webhooks.allow_private";
  co_return answer;
}

asio::awaitable<void> Deliverer::conclude(std::shared_ptr<Endpoint> endpoint, std::shared_ptr<Waiting> waiting,
                                          HttpClient::Answer answer) {
  Delivery& delivery = waiting->delivery;
  const std::int64_t now = unix_ms();
  if (answer.status >= 200 && answer.status < 300) {
    count("delivered");
    endpoint->failures = 0;
    endpoint->rests_until_ms = 0;
    if (!waiting->keeps) co_return;
    // The delivery may be stored, too, by a coordinator that led before.
    auto removed = co_await store_.remove(delivery.id);
    if (removed && !waiting->entry.empty()) removed = co_await store_.forget(waiting->entry);
    if (!removed) loaded_ = false;
    start_due(endpoint);
    co_return;
  }
  ++delivery.attempts;
  delivery.error =
      excerpt(answer.status > 0 ? "the receiver answered " + std::to_string(answer.status) : answer.error, 300);
  delivery.due_ms = now + pause_ms(delivery.attempts);
  if (++endpoint->failures >= kFailuresToRest)
    endpoint->rests_until_ms = now + pause_ms(endpoint->failures - kFailuresToRest + 1);
  count("failed");
  if (!waiting->keeps) co_return;
  delivery.dead = answer.status == kGone || now - delivery.first_ms >= settings_.webhooks.give_up_ms;
  if (delivery.dead) {
    count("dead");
    spdlog::warn("webhooks: gave up {} of tenant '{}' to {} after {} attempts: {}", delivery.id, delivery.tenant,
                 host_of(delivery.url), delivery.attempts, delivery.error);
  }
  if (!co_await store(*waiting)) loaded_ = false;
  if (!delivery.dead) add(std::move(waiting));
}

std::int64_t Deliverer::pause_ms(int failures) {
  const std::int64_t first = settings_.webhooks.retry_ms;
  const std::int64_t pause = std::min(std::max(first, kLongestPauseMs), first << std::min(failures - 1, 20));
  return static_cast<std::int64_t>(static_cast<double>(pause) * std::uniform_real_distribution(0.8, 1.2)(random_));
}

}  // namespace ditfleet::gateway
