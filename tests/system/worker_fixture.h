// A worker service in this process, on a real Redis, with a model made for the test.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <thread>

#include "shared/core/bytes.h"
#include "shared/job/validate.h"
#include "tests/fixtures/image_model.h"
#include "tests/system/queue_fixture.h"
#include "worker/service.h"

namespace ditfleet::testing {

using namespace std::chrono_literals;

// What the fake model did, in order, and what it is told to do.
struct Script {
  std::mutex mutex;
  std::vector<std::string> log;  // "text <seed>", "step <seed>/<k>", "decoded <seed>" …
  std::function<std::optional<Error>(const std::string& event)> on_event;  // an error makes that stage fail
  std::atomic<int> step_ms{5}, load_ms{0};
  std::vector<worker::WarmupClass> warmup_classes;  // set before the worker starts
  std::optional<job::ModelEntry> entry;             // of the model, if not demo_entry(); the same
  pipeline::AdapterHoldings adapters;               // of the model; under the mutex once a worker runs
  std::set<std::string> pinned;                     // as it was told last; the same
  pipeline::MemoryReport memory;  // of the model, which is resident after the last step; under the mutex
  bool store_throws = false;      // set before the worker starts
  std::atomic<int> inputs_read = 0, readies = 0;

  std::optional<Error> note(const std::string& event) {
    {
      const std::lock_guard lock(mutex);
      log.push_back(event);
    }
    return on_event ? on_event(event) : std::nullopt;
  }
  void forget() {
    const std::lock_guard lock(mutex);
    log.clear();
  }
  std::ptrdiff_t index_of(const std::string& event) {
    const std::lock_guard lock(mutex);
    const auto at = std::find(log.begin(), log.end(), event);
    return at == log.end() ? -1 : at - log.begin();
  }
};

// Holds the thread of an event, by default the encoding of the picture of seed 1, until it is released.
class HeldEvent {
 public:
  explicit HeldEvent(Script& script, const std::string& held = "pixels 1") {
    script.on_event = [state = state_, held](const std::string& event) -> std::optional<Error> {
      if (event == held) {
        state->reached = true;
        while (!state->released) std::this_thread::sleep_for(1ms);
      }
      return std::nullopt;
    };
  }
  ~HeldEvent() { release(); }  // a test that fails meanwhile must not leave the worker waiting
  bool reached() const { return state_->reached; }
  void release() { state_->released = true; }

 private:
  struct State {
    std::atomic<bool> reached{false}, released{false};
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

class FakeGeneration final : public pipeline::Generation {
 public:
  pipeline::GenerationRequest request;
  std::vector<std::string> warnings() const override { return {"the prompt was cut"}; }
  std::vector<std::pair<std::string, std::int64_t>> phases_us() const override {
    return {{"text", 11}, {"denoise", 22}, {"vae", 33}};
  }
  Result<void> dump(const std::string&) const override { return internal_error("not here"); }
  int skipped_steps() const override { return skipped; }
  int skipped = 0;
};

// A picture whose every byte is the seed's.
inline pipeline::Media picture(std::int64_t seed, int width, int height) {
  return {width, height, 1, 0,
          std::vector<std::uint8_t>(static_cast<std::size_t>(width) * height * 3, static_cast<std::uint8_t>(seed))};
}

class FakeWriter final : public media::MediaWriter {
 public:
  explicit FakeWriter(std::shared_ptr<Script> script) : script_(std::move(script)) {}
  void add(const media::Media&) override {}
  Result<std::string> finish(const media::Media& image, const std::string&) override {
    if (auto error = script_->note("pixels " + std::to_string(image.rgb.at(0)))) return *error;
    return "PIXELS" + std::string(image.rgb.begin(), image.rgb.end());
  }

 private:
  const std::shared_ptr<Script> script_;
};

class FakeModel final : public pipeline::Model {
 public:
  explicit FakeModel(std::shared_ptr<Script> script) : script_(std::move(script)) {}
  const pipeline::ModelInfo& info() const override { return info_; }
  pipeline::MemoryReport memory() const override {
    const std::lock_guard lock(script_->mutex);
    return script_->memory;
  }

  Result<pipeline::RequestSize> size_of(const pipeline::GenerationRequest&) const override {
    return pipeline::RequestSize();
  }
  Result<std::unique_ptr<pipeline::Generation>> encode(const pipeline::GenerationRequest& request) override {
    if (auto error = script_->note("text " + std::to_string(request.seed))) return *error;
    for (const auto& image : request.images)
      script_->note("image " + std::to_string(image->width) + "x" + std::to_string(image->height));
    if (request.mask)
      script_->note("mask " + std::to_string(request.mask->width) + "x" + std::to_string(request.mask->height));
    auto prepared = std::make_unique<FakeGeneration>();
    prepared->request = request;
    return std::unique_ptr<pipeline::Generation>(std::move(prepared));
  }
  Result<void> denoise(pipeline::Generation& prepared, const pipeline::StepCallback& on_step) override {
    const auto& request = static_cast<FakeGeneration&>(prepared).request;
    const int steps = static_cast<int>(*request.fields.integer("num_inference_steps"));
    for (int step = 1; step <= steps; ++step) {
      std::this_thread::sleep_for(std::chrono::milliseconds(script_->step_ms));
      if (auto error = script_->note("step " + std::to_string(request.seed) + "/" + std::to_string(step)))
        return *error;
      const bool skipped = request.fields.has("cache") && step % 2 == 0;
      static_cast<FakeGeneration&>(prepared).skipped += skipped;
      const pipeline::StepProgress progress{
          step, steps, [&]() -> Result<pipeline::Media> { return picture(100 + step, 2, 2); }, skipped};
      if (!on_step(progress)) {
        script_->note("stopped " + std::to_string(request.seed));
        return Error{Code::kCanceled, "stopped", {}};
      }
    }
    const std::lock_guard lock(script_->mutex);
    script_->memory.resident = true;
    return {};
  }
  Result<pipeline::Media> decode(pipeline::Generation& prepared, const pipeline::FrameCallback&) override {
    const auto& request = static_cast<FakeGeneration&>(prepared).request;
    if (auto error = script_->note("decoded " + std::to_string(request.seed))) return *error;
    return picture(request.seed, static_cast<int>(*request.fields.integer("width")),
                   static_cast<int>(*request.fields.integer("height")));
  }
  // "prefetch <what the file holds>[ drop from host <id> …][ drop from slots <id> …]" for each. As many stay in slots
  // as there are, all in host memory.
  Result<void> prefetch(const std::vector<pipeline::LoraRequest>& loras, const pipeline::AdapterDrops& drops) override {
    std::string drop;
    for (const auto& [tier, ids] :
         {std::pair(" drop from host", &drops.from_host), std::pair(" drop from slots", &drops.from_slots)}) {
      for (const auto& id : *ids) drop += (&id == ids->data() ? tier : "") + (" " + id);
    }
    for (const auto& lora : loras) {
      auto content = read_file(lora.path);
      if (!content) return content.error();
      if (auto error = script_->note("prefetch " + content->substr(0, 40) + drop)) {
        if (const auto at = error->message.find("PATH"); at != std::string::npos)
          error->message.replace(at, 4, lora.path);
        return *error;
      }
      const std::lock_guard lock(script_->mutex);
      auto& held = script_->adapters;
      for (auto* tier : {&held.in_slots, &held.in_host}) {
        std::erase(*tier, lora.id);
        tier->insert(tier->begin(), lora.id);
      }
      if (held.in_slots.size() > static_cast<std::size_t>(held.slots))
        held.in_slots.resize(static_cast<std::size_t>(held.slots));
    }
    return {};
  }
  void pin_adapters(const std::set<std::string>& ids) override {
    const std::lock_guard lock(script_->mutex);
    script_->pinned = ids;
  }
  void forget_adapter(const std::string& id) override {
    script_->note("forget " + id);
    const std::lock_guard lock(script_->mutex);
    std::erase(script_->adapters.in_slots, id);
    std::erase(script_->adapters.in_host, id);
  }
  pipeline::AdapterHoldings adapters() const override {
    const std::lock_guard lock(script_->mutex);
    return script_->adapters;
  }

 private:
  std::shared_ptr<Script> script_;
  pipeline::ModelInfo info_{.name = "demo",
                            .linears = {{"text_encoder", {{"fp32", 3}}}, {"transformer", {{"fp32", 1}, {"nf4", 2}}}}};
};

// Counts the inputs that are read. If the script says so, its first put() ends by an exception.
class ScriptedStore final : public results::Store {
 public:
  ScriptedStore(std::shared_ptr<results::Store> store, std::shared_ptr<Script> script)
      : store_(std::move(store)), script_(std::move(script)) {}
  asio::awaitable<Result<results::Manifest>> put(const results::ResultKey& result, std::string bytes,
                                                 std::string media_type, Deadline deadline) override {
    if (std::exchange(script_->store_throws, false)) throw std::runtime_error("on purpose");
    co_return co_await store_->put(result, std::move(bytes), std::move(media_type), deadline);
  }
  asio::awaitable<Result<std::string>> get(const results::Manifest& manifest, Deadline deadline) override {
    return store_->get(manifest, deadline);
  }
  asio::awaitable<Result<std::string>> get_piece(const results::Manifest& manifest, std::int64_t offset,
                                                 std::int64_t size, Deadline deadline) override {
    return store_->get_piece(manifest, offset, size, deadline);
  }
  asio::awaitable<Result<void>> remove(const results::Manifest& manifest, Deadline deadline) override {
    return store_->remove(manifest, deadline);
  }
  asio::awaitable<Result<std::string>> put_preview(const results::ResultKey& result, int index, std::string bytes,
                                                   Deadline deadline) override {
    return store_->put_preview(result, index, std::move(bytes), deadline);
  }
  asio::awaitable<Result<std::string>> get_preview(const std::string& key, Deadline deadline) override {
    return store_->get_preview(key, deadline);
  }
  asio::awaitable<Result<void>> put_input(const std::string& sha256, std::string bytes, Deadline deadline) override {
    return store_->put_input(sha256, std::move(bytes), deadline);
  }
  asio::awaitable<Result<void>> touch_input(const std::string& sha256, Deadline deadline) override {
    return store_->touch_input(sha256, deadline);
  }
  asio::awaitable<Result<std::string>> get_input(const std::string& sha256, Deadline deadline) override {
    ++script_->inputs_read;
    return store_->get_input(sha256, deadline);
  }
  asio::awaitable<Result<void>> remove_input(const std::string& sha256, Deadline deadline) override {
    return store_->remove_input(sha256, deadline);
  }

 private:
  std::shared_ptr<results::Store> store_;
  std::shared_ptr<Script> script_;
};

inline job::ModelEntry demo_entry() { return job::image_model("demo", 64, 4); }

// A service on a thread of its own.
class RunningWorker {
 public:
  // `adapters`: their folders; a source is added.
  RunningWorker(const redis::Endpoint& endpoint, worker::ServiceOptions options, std::shared_ptr<Script> script,
                const queue::QueueOptions& queue_options, worker::AdapterOptions adapters = {}) {
    redis::ConnectionOptions connection_options;
    connection_options.endpoint = endpoint;
    worker::ServiceParts parts;
    parts.connection = redis::Connection::create(io_.get_executor(), connection_options);
    parts.queue = std::make_shared<queue::Client>(parts.connection, queue_options);
    parts.store = std::make_shared<ScriptedStore>(*results::open_store({}, parts.connection), script);
    parts.on_ready = [script] { ++script->readies; };
    parts.adapters = std::move(adapters);
    parts.adapters.source = worker::registry_source(redis::Connection::create(io_.get_executor(), connection_options));
    parts.load = [script]() -> Result<worker::ModelSet> {
      std::this_thread::sleep_for(std::chrono::milliseconds(script->load_ms));
      if (auto error = script->note("load")) return *error;
      worker::ModelSet set;
      set.device = set.device_name = "fake";
      set.precision = "fp32";
      set.catalogue.models.emplace("demo", script->entry ? *script->entry : demo_entry());
      set.models.emplace("demo", std::make_unique<FakeModel>(script));
      set.warmup_classes = script->warmup_classes;
      return set;
    };
    parts.open_writer = [script](job::OutputFormat, int) { return std::make_unique<FakeWriter>(script); };
    service_ = std::make_unique<worker::Service>(io_, std::move(options), std::move(parts));
    thread_ = std::thread([this] {
      const auto main = [this]() -> asio::awaitable<void> {
        exit_code_ = co_await service_->run();
        io_.stop();  // the queue client's own connections live as long as it does
      };
      asio::co_spawn(io_, main, asio::detached);
      io_.run();
    });
  }
  ~RunningWorker() {
    if (thread_.joinable()) {
      asio::post(io_, [this] { service_->quit(); });
      thread_.join();
    }
  }

  void drain() {
    asio::post(io_, [this] { service_->drain(); });
  }
  void quit() {
    asio::post(io_, [this] { service_->quit(); });
  }
  int join() {
    thread_.join();
    return exit_code_;
  }
  bool busy() const { return service_->busy(); }  // after join()
  std::string why_not_ready() const { return service_->why_not_ready(); }
  const std::string& owner() const { return service_->owner(); }

 private:
  asio::io_context io_{1};
  std::unique_ptr<worker::Service> service_;
  std::thread thread_;
  int exit_code_ = -1;
};

class WorkerTest : public QueueTest {
 protected:
  explicit WorkerTest(queue::QueueOptions options = quick()) : QueueTest({}, options) {}

  static queue::QueueOptions quick() {
    queue::QueueOptions options;
    options.lease_ms = 3000;
    options.retry_backoff_ms = 1;
    options.retry_backoff_max_ms = 1;
    return options;
  }
  worker::ServiceOptions service_options(const std::string& name = "w1") const {
    worker::ServiceOptions options;
    options.name = name;
    options.lease = std::chrono::milliseconds(options_.lease_ms);
    options.timing.renew = options.lease / 5;
    options.timing.step = 20ms;
    options.timing.retry = 50ms;
    options.heartbeat = 50ms;
    options.drain = 5s;
    options.warmup = false;
    return options;
  }
  std::unique_ptr<RunningWorker> start_worker(const worker::ServiceOptions& options) {
    return std::make_unique<RunningWorker>(server_.endpoint(), options, script_, options_, adapters_);
  }
  std::unique_ptr<RunningWorker> start_ready_worker(const std::string& name = "w1") {
    auto worker = start_worker(service_options(name));
    EXPECT_TRUE(until([&] { return worker_state(name) == "ready"; }));
    return worker;
  }

  // Tries until it holds or ten seconds are over.
  bool until(const std::function<bool()>& holds, std::chrono::milliseconds limit = 10s) {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (!holds()) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(2ms);
    }
    return true;
  }
  std::string worker_state(const std::string& name) {
    auto workers = wait(client_->workers(soon()));
    if (!workers) return "?";
    for (const auto& info : *workers) {
      if (info.name == name) return info.state;
    }
    return "";
  }
  bool logged(const std::string& event) { return script_->index_of(event) >= 0; }

  static job::JobSpec spec(std::int64_t seed, int units = 1) {
    job::JobSpec spec;
    spec.model = "demo";
    spec.prompt = "a red circle";
    spec.n = units;
    spec.seed = seed;
    spec.fields.set("width", 32);
    spec.fields.set("height", 32);
    spec.fields.set("num_inference_steps", 4);
    spec.fields.set("guidance_scale", 3.5);
    spec.fields.set("true_cfg_scale", 1.0);
    spec.fields.set("max_sequence_length", 64);
    spec.output_format = job::OutputFormat::kPng;
    spec.output_compression = 100;
    return spec;
  }
  // Submitted and admitted, ready to be assigned.
  std::string ready(const std::string& spec_json, int units = 1) {
    auto s = submission();
    s.spec = spec_json;
    const std::string id = submit(s);
    admit_all(units);
    return id;
  }
  std::string ready(const job::JobSpec& spec) { return ready(job::to_json(spec), *spec.n); }
  bool reaches(const std::string& id, job::State state) {
    return until([&] { return job(id).state == state; });
  }
  std::string picture_bytes(const std::string& id, int unit = 0) {
    auto manifest = results::Manifest::parse(job(id).unit_records.at(static_cast<std::size_t>(unit)).manifest);
    EXPECT_TRUE(manifest.ok());
    auto store = *results::open_store({}, connection_);
    auto bytes = wait(store->get(*manifest, soon()));
    EXPECT_TRUE(bytes.ok()) << (bytes ? "" : bytes.error().message);
    return bytes ? *bytes : "";
  }
  static std::string expected_bytes(std::int64_t seed) {
    return "PIXELS" + std::string(32 * 32 * 3, static_cast<char>(seed));
  }
  std::size_t keys_like(const std::string& pattern) { return redis({"KEYS", pattern}).elements.size(); }

  std::shared_ptr<Script> script_ = std::make_shared<Script>();
  worker::AdapterOptions adapters_;  // of workers started from here on
};

}  // namespace ditfleet::testing
