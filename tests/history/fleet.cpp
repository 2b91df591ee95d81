#include "tests/history/fleet.h"

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "coordinator/scheduling/service/scheduler_service.h"
#include "shared/core/ids.h"
#include "shared/core/sha256.h"
#include "shared/job/spec_json.h"
#include "shared/queue/keys.h"
#include "shared/queue/library.h"
#include "shared/results/store.h"
#include "tests/fixtures/image_model.h"
#include "tests/history/judge.h"
#include "worker/service.h"

namespace ditfleet::queue {
std::string_view next_library_text();  // of the later version; see CMakeLists.txt
int next_library_build();
}  // namespace ditfleet::queue

namespace ditfleet::history {
namespace {

using namespace std::chrono_literals;
using Kind = PlannedFault::Kind;
using Nature = PlannedJob::Nature;

job::ModelEntry entry() { return job::image_model("demo", 64, 4); }
job::Catalogue catalogue() {
  static const job::Catalogue one = [] {
    job::Catalogue out;
    out.models.emplace("demo", entry());
    out.default_model = "demo";
    return out;
  }();
  return one;
}

std::string spec_of(const Ordered& order) {
  job::JobSpec spec;
  spec.model = "demo";
  spec.prompt = "a red circle";
  spec.n = order.plan.units;
  spec.seed = order.seed;
  spec.fields.set("width", 32);
  spec.fields.set("height", 32);
  spec.fields.set("num_inference_steps", order.plan.steps);
  spec.fields.set("guidance_scale", 3.5);
  spec.fields.set("true_cfg_scale", 1.0);
  spec.fields.set("max_sequence_length", 64);
  spec.output_format = job::OutputFormat::kPng;
  spec.output_compression = 100;
  return job::to_json(spec);
}

std::shared_ptr<redis::Connection> connect(Process& process) {
  redis::ConnectionOptions options;
  options.connect_timeout = 1000ms;
  options.backoff_max = 200ms;
  return redis::Connection::create(process.io().get_executor(), options);
}

// ---- the store

class FakeStore final : public results::Store {
 public:
  FakeStore(Fleet& fleet, asio::any_io_executor executor) : fleet_(fleet), executor_(std::move(executor)) {}

  asio::awaitable<Result<results::Manifest>> put(const results::ResultKey& result, std::string bytes,
                                                 std::string media_type, Deadline deadline) override {
    if (auto failed = co_await wait(deadline); !failed) co_return failed.error();
    results::Manifest manifest;
    manifest.backend = "file";
    manifest.key = result.job + ":" + std::to_string(result.unit) + ":" + result.nonce;
    manifest.media_type = std::move(media_type);
    manifest.bytes = static_cast<std::int64_t>(bytes.size());
    Sha256 digest;
    digest.update(bytes);
    manifest.sha256 = digest.hex();
    manifest.nonce = result.nonce;
    fleet_.store[manifest.key] = std::move(bytes);
    co_return manifest;
  }
  asio::awaitable<Result<std::string>> get(const results::Manifest& manifest, Deadline deadline) override {
    if (auto failed = co_await wait(deadline); !failed) co_return failed.error();
    const auto it = fleet_.store.find(manifest.key);
    if (it == fleet_.store.end()) co_return Error{Code::kNotFound, "no such result"};
    co_return it->second;
  }
  asio::awaitable<Result<std::string>> get_piece(const results::Manifest&, std::int64_t, std::int64_t,
                                                 Deadline) override {
    co_return internal_error("not used");
  }
  asio::awaitable<Result<void>> remove(const results::Manifest& manifest, Deadline deadline) override {
    if (auto failed = co_await wait(deadline); !failed) co_return failed.error();
    fleet_.store.erase(manifest.key);
    co_return Result<void>();
  }
  asio::awaitable<Result<std::string>> put_preview(const results::ResultKey&, int, std::string, Deadline) override {
    co_return internal_error("not used");
  }
  asio::awaitable<Result<std::string>> get_preview(const std::string&, Deadline) override {
    co_return internal_error("not used");
  }
  asio::awaitable<Result<void>> put_input(const std::string&, std::string, Deadline) override {
    co_return Result<void>();
  }
  asio::awaitable<Result<void>> touch_input(const std::string&, Deadline) override { co_return Result<void>(); }
  asio::awaitable<Result<std::string>> get_input(const std::string&, Deadline) override {
    co_return internal_error("not used");
  }
  asio::awaitable<Result<void>> remove_input(const std::string&, Deadline) override { co_return Result<void>(); }

 private:
  asio::awaitable<Result<void>> wait(Deadline deadline) {
    const std::int64_t slow = std::max<std::int64_t>(0, fleet_.store_slow_until - fleet_.world.now());
    const auto time = std::chrono::microseconds(fleet_.store_delay + slow);
    const bool late = Deadline::Clock::now() + time > deadline.time_point();
    asio::steady_timer timer(executor_, late ? deadline.time_point() : Deadline::Clock::now() + time);
    co_await timer.async_wait(asio::use_awaitable);
    if (late) co_return Error{Code::kDeadlineExceeded, "the store is slow"};
    if (fleet_.world.now() < fleet_.store_broken_until) co_return unavailable("the store is broken");
    co_return Result<void>();
  }
  Fleet& fleet_;
  asio::any_io_executor executor_;
};

}  // namespace

// ---- a worker

struct Fleet::Worker {
  Fleet* fleet = nullptr;
  int index = 0;
  Process* process = nullptr;
  std::unique_ptr<worker::Service> service;
  bool draining = false;
};

namespace {

class FakeGeneration final : public pipeline::Generation {
 public:
  pipeline::GenerationRequest request;
  int from = 0;
  std::vector<std::string> warnings() const override { return {}; }
  std::vector<std::pair<std::string, std::int64_t>> phases_us() const override { return {{"denoise", 1}}; }
  void go_on_from(std::string state) override { from = std::stoi(state.substr(state.find('/') + 1)); }
  Result<void> dump(const std::string&) const override { return internal_error("not used"); }
};

class FakeWriter final : public media::MediaWriter {
 public:
  void add(const media::Media&) override {}
  Result<std::string> finish(const media::Media& image, const std::string&) override {
    World::get().sleep(3 * kMs);
    return std::string(image.rgb.begin(), image.rgb.end());
  }
};

class FakeModel final : public pipeline::Model {
 public:
  explicit FakeModel(Fleet::Worker& worker) : worker_(worker) {}
  const pipeline::ModelInfo& info() const override { return info_; }
  Result<pipeline::RequestSize> size_of(const pipeline::GenerationRequest&) const override {
    return pipeline::RequestSize();
  }
  Result<std::unique_ptr<pipeline::Generation>> encode(const pipeline::GenerationRequest& request) override {
    World::get().sleep(5 * kMs);
    auto prepared = std::make_unique<FakeGeneration>();
    prepared->request = request;
    return std::unique_ptr<pipeline::Generation>(std::move(prepared));
  }
  Result<void> denoise(pipeline::Generation& prepared, const pipeline::StepCallback& on_step) override {
    auto& generation = static_cast<FakeGeneration&>(prepared);
    const auto& request = generation.request;
    int unit = 0;
    Ordered* order = worker_.fleet->order_of(request.seed, &unit);
    const int steps = static_cast<int>(*request.fields.integer("num_inference_steps"));
    for (int step = generation.from + 1; step <= steps; ++step) {
      World::get().sleep(order->plan.step);
      switch (order->plan.nature) {
        case Nature::kPlain: break;
        case Nature::kFailsOnce:
          if (order->failures[unit]++ == 0) return Error{Code::kOutOfMemory, "no memory"};
          break;
        case Nature::kFails: return Error{Code::kInvalidArgument, "it cannot be made"};
        case Nature::kHangs:
          if (order->failures[unit]++ == 0) World::get().sleep(3600 * kSecond);
          break;
        case Nature::kKillsWorkers: worker_.fleet->worker_dies(worker_); World::get().sleep(3600 * kSecond);
      }
      const pipeline::StepProgress progress{
          step, steps, [] { return Result<pipeline::Media>(internal_error("not used")); }, false,
          [&](std::int64_t) { return Result<std::string>(std::to_string(request.seed) + "/" + std::to_string(step)); }};
      if (!on_step(progress)) return Error{Code::kCanceled, "stopped", {}};
    }
    return {};
  }
  Result<pipeline::Media> decode(pipeline::Generation& prepared, const pipeline::FrameCallback&) override {
    World::get().sleep(10 * kMs);
    const std::string text = std::to_string(static_cast<FakeGeneration&>(prepared).request.seed);
    return pipeline::Media{1, 1, 1, 0, std::vector<std::uint8_t>(text.begin(), text.end())};
  }
  Result<void> prefetch(const std::vector<pipeline::LoraRequest>&, const pipeline::AdapterDrops&) override {
    return {};
  }
  void pin_adapters(const std::set<std::string>&) override {}
  void forget_adapter(const std::string&) override {}
  pipeline::AdapterHoldings adapters() const override { return {}; }

 private:
  Fleet::Worker& worker_;
  pipeline::ModelInfo info_{.name = "demo"};
};

}  // namespace

struct Fleet::Coordinator {
  Fleet* fleet = nullptr;
  int index = 0;
  Process* process = nullptr;
  std::shared_ptr<redis::Connection> connection;
  std::unique_ptr<scheduling::SchedulerService> service;
};

struct Fleet::Producer {
  Process* process = nullptr;
  std::shared_ptr<redis::Connection> connection;
  std::shared_ptr<queue::Client> client;
};

const std::string& next_library() {
  static const std::string text =
      queue::loadable_library(queue::next_library_text(), std::to_string(queue::next_library_build()) + " next");
  return text;
}

queue::QueueOptions queue_options() {
  queue::QueueOptions options;
  options.lease_ms = kLease / kMs;
  options.retry_backoff_ms = 100;
  options.retry_backoff_max_ms = 1000;
  return options;
}

Fleet::Fleet(World& world, const Plan& plan) : world(world), plan(plan), redis(world) {
  std::int64_t seed = 1000;
  for (const auto& job : plan.jobs) {
    orders.push_back({.plan = job, .seed = seed});
    seed += 100;
  }
}
Fleet::~Fleet() = default;

Ordered* Fleet::order_of(std::int64_t seed, int* unit) {
  for (auto& order : orders) {
    if (seed < order.seed || seed >= order.seed + 100) continue;
    if (unit) *unit = static_cast<int>(seed - order.seed);
    return &order;
  }
  return nullptr;
}

void Fleet::start_coordinator(int index) {
  auto coordinator = std::make_shared<Coordinator>();
  coordinator->fleet = this;
  coordinator->index = index;
  coordinator->process = &world.add("coordinator " + std::to_string(index));
  dead_.push_back(std::exchange(coordinators_[static_cast<std::size_t>(index)], coordinator));
  asio::post(coordinator->process->io(), [this, coordinator] {
    coordinator->connection = connect(*coordinator->process);
    coordinator->connection->start();
    scheduling::SchedulerServiceOptions options;
    options.coordinator = new_id();
    options.leader_ttl_ms = 1000;
    options.scheduler.catalogue = catalogue();
    options.scheduler.silent_after_ms = 1500;
    options.scheduler.new_nonce = new_nonce;
    coordinator->service = std::make_unique<scheduling::SchedulerService>(
        coordinator->process->io().get_executor(), coordinator->connection,
        std::make_shared<queue::Client>(coordinator->connection, queue_options()), options);
    coordinator->service->start();
  });
}

void Fleet::start_worker(int index) {
  auto worker = std::make_shared<Worker>();
  worker->fleet = this;
  worker->index = index;
  worker->process = &world.add("worker " + std::to_string(index));
  dead_.push_back(std::exchange(workers_[static_cast<std::size_t>(index)], worker));
  asio::post(worker->process->io(), [this, worker] {
    worker::ServiceOptions options;
    options.name = "w" + std::to_string(worker->index);
    options.capacity = plan.capacity;
    options.lease = std::chrono::milliseconds(queue_options().lease_ms);
    options.timing.renew = 300ms;
    options.timing.orphan = 20s;
    options.heartbeat = 400ms;
    options.drain = 1s;
    options.stuck = 1s;
    options.warmup = false;
    worker::ServiceParts parts;
    parts.connection = connect(*worker->process);
    parts.queue = std::make_shared<queue::Client>(parts.connection, queue_options());
    parts.store = std::make_shared<FakeStore>(*this, worker->process->io().get_executor());
    parts.checkpoint_interval = std::chrono::milliseconds(plan.checkpoint_every / kMs);
    parts.load = [worker = worker.get()]() -> Result<worker::ModelSet> {
      World::get().sleep(100 * kMs);
      worker::ModelSet set;
      set.device = set.device_name = "fake";
      set.precision = "fp32";
      set.catalogue = catalogue();
      set.models.emplace("demo", std::make_unique<FakeModel>(*worker));
      set.receipts.emplace("demo", R"({"model":"demo"})");
      return set;
    };
    parts.open_writer = [](job::OutputFormat, int) { return std::make_unique<FakeWriter>(); };
    worker->service = std::make_unique<worker::Service>(worker->process->io(), std::move(options), std::move(parts));
    asio::co_spawn(
        worker->process->io(), worker->service->run(), [this, worker](const std::exception_ptr& thrown, int) {
          if (thrown) broken = "an exception ended a worker";
          worker->process->alive = false;
          world.after(world.random().between(100, 1500) * kMs, [this, index = worker->index] { start_worker(index); });
        });
  });
}

void Fleet::worker_dies(Worker& worker) {
  if (!worker.process->alive) return;
  worker.process->alive = false;
  worker.process->io().stop();
  redis.end(*worker.process);
  world.after(world.random().between(100, 2500) * kMs, [this, index = worker.index] { start_worker(index); });
}

// ---- the producer

namespace {

void stop(Process& process, std::int64_t until) { process.stopped_until = std::max(process.stopped_until, until); }

// Asks for a change of a job until the answer is clear.
asio::awaitable<void> repeat(const Ordered& order, auto ask) {
  asio::steady_timer pause(co_await asio::this_coro::executor);
  for (int attempt = 0; attempt < 30; ++attempt) {
    const auto outcome = co_await ask();
    // A job that came by XADD is unknown until it is admitted.
    const bool unknown = !outcome && outcome.error().code == Code::kNotFound && order.plan.by_stream;
    if (outcome ||
        (outcome.error().code != Code::kUnavailable && outcome.error().code != Code::kDeadlineExceeded && !unknown))
      co_return;
    pause.expires_after(200ms);
    co_await pause.async_wait(asio::use_awaitable);
  }
}

// Until it is acknowledged or refused, as a client with a key or an id of its own does.
asio::awaitable<void> submit_job(Fleet& fleet, Ordered& order, std::shared_ptr<redis::Connection> connection,
                                 std::shared_ptr<queue::Client> client) {
  queue::Submission submission;
  submission.id = order.id = new_id();
  submission.tenant = "t" + std::to_string(order.plan.tenant);
  submission.spec = spec_of(order);
  submission.units = order.plan.units;
  submission.deadline_in_ms = order.plan.deadline_in / kMs;
  if (order.plan.has_key) submission.idempotency_key = "key of " + std::to_string(order.seed);
  asio::steady_timer pause(connection->executor());
  for (bool first = true; !order.acknowledged && !order.refused; first = false) {
    if (order.plan.by_stream) {
      redis::Command command("XADD");
      command << queue::Keys(0).in() << "*"
              << "id" << order.id << "tenant" << submission.tenant << "spec" << submission.spec;
      const auto reply = co_await connection->execute(std::move(command), Deadline::after(1s));
      order.acknowledged = reply.ok();
    } else {
      // With a key, a repeated request has another id, as behind a gateway.
      if (order.plan.has_key && !first) submission.id = new_id();
      const auto outcome = co_await client->submit(submission, Deadline::after(1s));
      if (outcome) {
        order.acknowledged = true;
        order.id = outcome->id;
      } else if (outcome.error().code != Code::kUnavailable && outcome.error().code != Code::kDeadlineExceeded &&
                 outcome.error().code != Code::kResourceExhausted) {
        order.refused = true;
        fleet.broken = "a submission was refused: " + outcome.error().message;
      }
    }
    if (order.acknowledged) {
      order.acknowledged_at = fleet.world.now();
      break;
    }
    pause.expires_after(200ms);
    co_await pause.async_wait(asio::use_awaitable);
  }
  if (order.plan.cancel_after > 0) {
    pause.expires_after(std::chrono::microseconds(order.plan.cancel_after));
    co_await pause.async_wait(asio::use_awaitable);
    order.cancel_sent = true;
    co_await repeat(order, [&] { return client->cancel(order.id, submission.tenant, Deadline::after(1s)); });
  }
  if (order.plan.pause_after > 0) {
    pause.expires_after(std::chrono::microseconds(order.plan.pause_after));
    co_await pause.async_wait(asio::use_awaitable);
    co_await repeat(order, [&] { return client->pause(order.id, submission.tenant, Deadline::after(1s)); });
    pause.expires_after(std::chrono::microseconds(order.plan.resume_after));
    co_await pause.async_wait(asio::use_awaitable);
    co_await repeat(order, [&] { return client->resume(order.id, submission.tenant, Deadline::after(1s)); });
    if (fleet.plan.replicated) {  // a Redis that loses data may lose this
      pause.expires_after(
          std::chrono::microseconds(std::max<std::int64_t>(0, fleet.last_fault_ends - fleet.world.now())));
      co_await pause.async_wait(asio::use_awaitable);
      co_await repeat(order, [&] { return client->resume(order.id, submission.tenant, Deadline::after(1s)); });
    }
  }
  order.settled = true;
}

// As a client reads them.
asio::awaitable<void> read_events(Ordered& order, std::shared_ptr<queue::Client> client) {
  for (int attempt = 0; attempt < 10 && !order.read; ++attempt) {
    auto events = co_await client->events(order.id, "0", 1000, Deadline::after(1s));
    order.read = events.ok();
    if (events) order.events = std::move(*events);
  }
}

}  // namespace

void Fleet::read() {
  for (auto& order : orders)
    asio::co_spawn(producer_->process->io(), read_events(order, producer_->client), asio::detached);
  producer_->process->wake();
}

void Fleet::look() {
  if (!broken.empty()) return;
  broken = disagreement(redis.model());
  const queue::Keys keys(0);
  // An epoch has one leader, and they grow unless Redis loses data.
  if (const auto* leader = redis.model().peek_as<std::string>(keys.leader())) {
    const std::int64_t epoch = std::stoll(*leader);
    const std::string name = leader->substr(leader->find(' ') + 1);
    const auto [known, fresh] = leaders_.emplace(epoch, name);
    // If the clock was set back and the counter lost, one may be given again.
    if (!fresh && known->second != name && !(plan.has(Kind::kClockStep) && plan.has(Kind::kFailOver)))
      broken = "two coordinators led with epoch " + std::to_string(epoch);
    if (fresh && known != std::prev(leaders_.end()) && !plan.has(Kind::kClockStep) && !plan.has(Kind::kFailOver))
      broken = "epoch " + std::to_string(epoch) + " comes after a later one";
  }
  int leading = 0;
  for (const auto& one : coordinators_) {
    const Process& process = *one->process;
    // One that was stopped finds out with its next look at the clock.
    if (process.alive && world.now() > process.stopped_until + kSecond && one->service && one->service->leading())
      ++leading;
  }
  if (leading < 2) two_lead_since_ = kNever;
  two_lead_since_ = std::min(two_lead_since_, leading < 2 ? kNever : world.now());
  if (two_lead_since_ < world.now() - 200 * kMs && !plan.has(Kind::kClockStep) && !plan.has(Kind::kFailOver))
    broken = "two coordinators lead";
}

void Fleet::submit(Ordered& order) {
  asio::co_spawn(producer_->process->io(), submit_job(*this, order, producer_->connection, producer_->client),
                 asio::detached);
  producer_->process->wake();
}

// ---- the plan

void Fleet::begin() {
  workers_.resize(static_cast<std::size_t>(plan.workers));
  coordinators_.resize(static_cast<std::size_t>(plan.coordinators));
  for (int i = 0; i < plan.coordinators; ++i) start_coordinator(i);
  for (int i = 0; i < plan.workers; ++i) start_worker(i);
  producer_ = std::make_shared<Producer>();
  producer_->process = &world.add("producer");
  asio::post(producer_->process->io(), [this] {
    producer_->connection = connect(*producer_->process);
    producer_->connection->start();
    producer_->client = std::make_shared<queue::Client>(producer_->connection, queue_options());
  });
  for (auto& order : orders) world.at(order.plan.at + kMs, [this, &order] { submit(order); });
  for (const auto& fault : plan.faults) {
    world.at(fault.at, [this, fault] { perform(fault); });
    last_fault_ends = std::max(last_fault_ends, fault.at + fault.lasts);
  }
  if (plan.replicated) {
    redis.rolled_back = [this] {
      for (auto& order : orders)
        order.lost = order.lost || (order.acknowledged && order.acknowledged_at >= redis.kept_at);
    };
    const auto again = std::make_shared<std::function<void()>>();
    *again = [this, again] {
      redis.keep();
      world.after(plan.lag, *again);
    };
    (*again)();
  }
  // An operator accepts what Redis' clock says.
  const auto accept = std::make_shared<std::function<void()>>();
  *accept = [this, accept] {
    const auto* mark = redis.model().peek_as<Hash>(queue::Keys(0).clock());
    if (mark && mark->contains("held") && !mark->find("held")->second.empty())
      redis.operate({"DEL", queue::Keys(0).clock()});
    world.after(3 * kSecond, *accept);
  };
  if (plan.has(Kind::kClockStep)) (*accept)();
}

Process* Fleet::any_process(int target) {
  std::vector<Process*> all{producer_->process};
  for (const auto& one : coordinators_) all.push_back(one->process);
  for (const auto& one : workers_) all.push_back(one->process);
  return all[static_cast<std::size_t>(target) % all.size()];
}

void Fleet::perform(const PlannedFault& fault) {
  const auto worker = workers_[static_cast<std::size_t>(fault.target % plan.workers)];
  const auto coordinator = coordinators_[static_cast<std::size_t>(fault.target % plan.coordinators)];
  Process& process = *any_process(fault.target);
  const std::int64_t until = world.now() + fault.lasts;
  switch (fault.kind) {
    case Kind::kKillWorker: worker_dies(*worker); break;
    case Kind::kKillCoordinator:
      if (!coordinator->process->alive) break;
      coordinator->process->alive = false;
      redis.end(*coordinator->process);
      world.at(until, [this, index = coordinator->index] { start_coordinator(index); });
      break;
    case Kind::kStopWorker: stop(*worker->process, until); break;
    case Kind::kStopCoordinator: stop(*coordinator->process, until); break;
    case Kind::kDrainWorker:
      asio::post(worker->process->io(), [worker] {
        if (worker->service) worker->service->drain();
      });
      worker->process->wake();
      break;
    case Kind::kRestartCoordinator: {
      if (!coordinator->process->alive) break;
      const auto end = [this, coordinator]() -> asio::awaitable<void> {
        if (coordinator->service) co_await coordinator->service->stop(Deadline::after(1s));
        coordinator->process->alive = false;
        redis.end(*coordinator->process);
        world.after(200 * kMs, [this, index = coordinator->index] { start_coordinator(index); });
      };
      // The function object lives as long as its coroutine.
      const auto kept = std::make_shared<decltype(end)>(end);
      asio::co_spawn(coordinator->process->io(), (*kept)(), [kept](const std::exception_ptr&) {});
      coordinator->process->wake();
      break;
    }
    case Kind::kUpgrade:
      if (redis.up()) redis.operate({"FUNCTION", "LOAD", "REPLACE", next_library()});
      break;
    case Kind::kCut: redis.cut(process); break;
    case Kind::kLoseReplies: redis.network(process).replies_lost_until = until; break;
    case Kind::kSilence: redis.silence(process); break;
    case Kind::kPartition:
      redis.network(process).reachable = false;
      redis.silence(process);
      world.at(until, [this, &process] { redis.network(process).reachable = true; });
      break;
    case Kind::kHold: {
      auto& held = redis.network(process).held_until;
      held = std::max(held, until);
      break;
    }
    case Kind::kStopRedis: redis.stop_until(until); break;
    case Kind::kCrashRedis:
      redis.crash();
      world.at(until, [this] { redis.start(); });
      break;
    case Kind::kFailOver: redis.fail_over(); break;
    case Kind::kClockStep: redis.clock_shift_us += (fault.target % 2 == 0 ? 1 : -1) * 4 * fault.lasts; break;
    case Kind::kFillMemory:
      redis.model().out_of_memory = true;
      world.at(until, [this] { redis.model().out_of_memory = false; });
      break;
    case Kind::kSlowStore: store_slow_until = until; break;
    case Kind::kBrokenStore: store_broken_until = until; break;
    case Kind::kCount: break;
  }
}

bool Fleet::quiet() {
  if (world.now() < last_fault_ends) return false;
  for (const auto& order : orders)
    if (!order.settled) return false;
  const queue::Keys keys(0);
  const auto* intake = redis.model().peek_as<Stream>(keys.in());
  return !redis.model().peek(keys.open()) && !redis.model().peek(keys.units()) && (!intake || intake->entries.empty());
}

}  // namespace ditfleet::history
