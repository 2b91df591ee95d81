#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include "shared/config/model_path.h"
#include "shared/core/host_name.h"
#include "shared/core/revision.h"
#include "shared/core/stop_signals.h"
#include "shared/families/served.h"
#include "shared/loras/content.h"
#include "shared/telemetry/metrics_server.h"
#include "shared/telemetry/otlp.h"
#include "shared/telemetry/process.h"
#include "worker/commands/command_line.h"
#include "worker/commands/engine_options.h"
#include "worker/families.h"
#include "worker/init_system.h"
#include "worker/models/model_timings.h"
#include "worker/service.h"
#include "worker/units/receipt.h"

namespace ditfleet::worker {
namespace {

struct RunFlags {
  config::Sources sources;
  MemoryFlags memory;
  std::string redis, name, device, dtype;  // empty: as configured
  std::vector<std::string> models;         // NAME=DIR; replace the configured models
  std::string quantize;                    // of every model in `models`
};

// The configuration, overridden by the flags. kInvalidArgument: the message contains the flag or key.
Result<config::Settings> settings_with(const RunFlags& flags) {
  config::Sources sources = flags.memory.over(flags.sources);
  // Like --set, so that the option table checks them.
  const auto put = [&](const char* key, const std::string& value) {
    if (!value.empty()) sources.sets.push_back(std::string(key) + "=" + value);
  };
  put("redis.url", flags.redis);
  put("worker.name", flags.name);
  put("worker.device", flags.device);
  put("worker.dtype", flags.dtype);
  auto settings = settings_of(sources);
  if (!settings) return settings;
  if (!flags.models.empty()) settings->models.clear();
  for (const std::string& model : flags.models) {
    const auto at = model.find('=');
    if (at == 0 || at == std::string::npos || at + 1 == model.size()) {
      return invalid_argument("--model is '" + model + "' but must be NAME=DIR, such as demo=models/demo");
    }
    auto quantize = config::parse_quantize(flags.quantize);
    if (!quantize) return quantize.error();
    const auto path = config::model_path(model.substr(at + 1));
    if (!path) return invalid_argument("--model: " + path.error().message);
    settings->models[model.substr(0, at)] = {.path = *path, .quantize = *quantize};
  }
  if (settings->redis.url.empty()) {
    return invalid_argument(
        "no Redis is configured; pass --redis URL or set redis.url (`ditfleet up` starts a private one)");
  }
  if (settings->models.empty()) {
    return invalid_argument("no model is configured; pass --model NAME=DIR or set models");
  }
  return settings;
}

Result<std::unique_ptr<pipeline::Engine>> engine_of_rank(const config::Settings& settings,
                                                         const pipeline::RankOptions& ranks) {
  auto options = engine_options(settings);
  if (!options) return options.error();
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const int processes = std::max(1, settings.worker.count) * settings.worker.gpus;
  options->threads = settings.worker.threads > 0 ? settings.worker.threads : std::max(1, cores / processes);
  options->ranks = ranks;
  return pipeline::Engine::create(*options, families());
}

// Loads every configured model. Errors: those of the engine. Blocks.
Result<ModelSet> load_models(const config::Settings& settings, Result<std::unique_ptr<pipeline::Engine>> engine) {
  ModelSet set;
  if (!engine) return engine.error();
  set.engine = std::move(*engine);
  set.device = set.engine->device();
  set.device_name = set.engine->device_name();
  set.precision = set.engine->precision();
  set.gpus = settings.worker.gpus;
  spdlog::info("blocks run on {}", set.engine->compile_backend());
  for (const auto& [name, model] : settings.models) {
    auto entry = families::read_model_entry(name, model.path, families::served());
    if (!entry) return entry.error();
    const pipeline::ModelSource source{name, model.path, model.files, model.quantize, model.vae_dtype, model.attention};
    auto loaded = set.engine->load_model(source);
    if (!loaded) return loaded.error();
    const auto& info = (*loaded)->info();
    record_load(info);
    spdlog::info("loaded model '{}' from {}: {} MiB of weights; {}", name, model.path, info.weight_bytes >> 20,
                 text_of(info.load_times));
    set.receipts.emplace(name, receipt_of_model(set, source, info,
                                                std::string("ditfleet ") + DITFLEET_VERSION + " " + kRevision + ", " +
                                                    set.engine->software()));
    set.catalogue.models.emplace(name, std::move(*entry));
    set.models.emplace(name, std::move(*loaded));
  }
  const auto counts = set.engine->region_counts();
  if (counts.compiles > 0)
    spdlog::info(
        "regions: {} programs, of which {} were compiled here{} in {} ms of compiler time; the others came from the "
        "kernel cache",
        counts.compiles, counts.built, set.device == "cpu" ? "" : " (including the GPU's fixed programs)",
        counts.compile_us / 1000);
  set.catalogue.default_model = settings.default_model;
  for (const auto& one : settings.worker.warmup_classes)
    set.warmup_classes.push_back({one.model, one.width.value(), one.height.value(), one.frames, one.max_sequence_length,
                                  one.true_cfg, one.gpus});
  return set;
}

std::string default_name() { return host_name() + "-" + std::to_string(::getpid()); }

Result<ServiceParts> make_parts(const config::Settings& settings, asio::io_context& io) {
  auto endpoint = config::redis_endpoint(settings);
  if (!endpoint) return endpoint.error();
  ServiceParts parts;
  parts.connection = redis::Connection::create(io.get_executor(), {.endpoint = *endpoint});
  parts.queue = std::make_shared<queue::Client>(parts.connection, queue::queue_options(settings));
  auto store = results::open_store(results::store_options(settings), parts.connection);
  if (!store) return store.error();
  parts.store = *store;
  parts.adapters.source = registry_source(redis::Connection::create(io.get_executor(), {.endpoint = *endpoint}));
  parts.adapters.cache_dir = settings.worker.lora.cache_dir;
  if (const std::string data = config::data_folder(settings); parts.adapters.cache_dir.empty() && !data.empty())
    parts.adapters.cache_dir = data + "/adapters";
  for (const auto& folder : loras::folders_of(settings.loras.folders)) parts.adapters.folders.push_back(folder);
  parts.adapters.cache_bytes = settings.worker.lora.cache_bytes;
  parts.open_writer = media::open_writer;
  if (settings.results.backend == "redis") parts.checkpoint_bytes = settings.results.redis_max_bytes - (1 << 16);
  parts.checkpoint_interval = std::chrono::milliseconds(settings.worker.checkpoint_ms);
  parts.carry_receipts = settings.results.carry_receipts;
  return parts;
}

ServiceOptions service_options(const config::Settings& settings) {
  ServiceOptions options;
  options.name = settings.worker.name.empty() ? default_name() : settings.worker.name;
  options.version = DITFLEET_VERSION;
  options.capacity = settings.scheduler.lookahead;
  options.lease = std::chrono::milliseconds(settings.queue.lease_ms);
  // Before the lease has expired, a silent Redis may only be slow.
  options.timing.orphan = std::max(options.lease, std::chrono::milliseconds(settings.worker.orphan_ms));
  options.timing.renew = std::chrono::milliseconds(settings.queue.renew_ms);
  options.timing.retry = std::min(options.timing.retry, options.timing.renew);
  options.heartbeat = std::chrono::milliseconds(settings.worker.heartbeat_ms);
  options.drain = std::chrono::milliseconds(settings.worker.drain_ms);
  options.stuck = std::chrono::milliseconds(settings.worker.stuck_ms);
  options.warmup = settings.worker.warmup;
  for (const auto& [name, model] : settings.models) options.models.push_back(name);
  options.adapter_slots = settings.worker.lora.slots;
  options.gpus = settings.worker.gpus;
  return options;
}

asio::awaitable<void> listen_for_signals(asio::signal_set& signals, Service& service) {
  const int first = co_await signals.async_wait(asio::use_awaitable);
  spdlog::info("SIG{}: draining; send a second signal to end immediately", ::sigabbrev_np(first));
  service.drain();
  co_await signals.async_wait(asio::use_awaitable);
  spdlog::warn("second signal: ending immediately");
  service.quit();
}

Result<int> serve(const RunFlags& flags) {
  auto settings = settings_with(flags);
  if (!settings) return settings.error();
  ::umask(077);  // images of tenants must not be readable by other users
  const EngineFactory create = [&](const pipeline::RankOptions& ranks) { return engine_of_rank(*settings, ranks); };
  auto ranks = start_ranks(*settings, create);  // before there are threads
  if (!ranks) return ranks.error();
  telemetry::show_build(DITFLEET_VERSION, kRevision);
  const auto& wanted = settings->telemetry;
  auto tracing = telemetry::start_tracing({wanted.otlp_endpoint, wanted.sample_rate, wanted.slow_s}, "ditfleet-worker",
                                          DITFLEET_VERSION);
  if (!tracing) return tracing.error();
  asio::io_context io(1);
  auto parts = make_parts(*settings, io);
  if (!parts) return parts.error();
  parts->load = [&] { return load_models(*settings, create_engine(*ranks, create)); };
  parts->on_ready = [] { notify_init_system("READY=1"); };
  Service service(io, service_options(*settings), std::move(*parts));
  std::unique_ptr<telemetry::MetricsServer> metrics;
  if (!settings->worker.metrics_listen.empty()) {
    auto server = telemetry::MetricsServer::start(settings->worker.metrics_listen,
                                                  [&service] { return service.why_not_ready(); });
    if (!server) return server.error();
    metrics = std::move(*server);
    spdlog::info("metrics: {}", metrics->url());
  }
  if (*ranks)
    (*ranks)->on_broken([&](const Error& error) { asio::post(io, [&service, error] { service.fail(error); }); });
  const bool hangup = hangup_ends();
  asio::signal_set signals(io, SIGINT, SIGTERM);
  if (hangup) signals.add(SIGHUP);
  asio::co_spawn(io, listen_for_signals(signals, service), asio::detached);
  int exit_code = kExitFailure;
  const auto main = [&]() -> asio::awaitable<void> {
    exit_code = co_await service.run();
    // A long step or a hung driver: its result is no longer needed, and the destructors would wait for it.
    if (service.busy()) {
      if (*ranks) (*ranks)->kill();
      spdlog::shutdown();
      std::_Exit(exit_code);
    }
    io.stop();  // the queue client's own connections live as long as it does
  };
  std::exception_ptr thrown;
  asio::co_spawn(io, main, [&](std::exception_ptr e) {
    thrown = e;
    if (e) io.stop();
  });
  io.run();
  if (*ranks) (*ranks)->on_broken({});
  if (thrown) std::rethrow_exception(thrown);
  return exit_code;
}

}  // namespace

void add_run(CLI::App& app, Invocation& invoked) {
  auto& command = *app.add_subcommand("run", "Serve the queue");
  const auto kept = std::make_shared<RunFlags>();
  RunFlags& flags = *kept;
  command.add_option("--redis", flags.redis, "Redis of the queue: redis://, rediss:// or unix:///PATH")
      ->type_name("URL");
  command.add_option("--model", flags.models, "Model to load: its name in requests and its folder; repeatable")
      ->type_name("NAME=DIR")
      ->allow_extra_args(false);
  command
      .add_option("--quantize", flags.quantize,
                  "Quantize components of these models while they are loaded: transformer to fp8 or nf4, text_encoder "
                  "and text_encoder_2 to nf4; auto: those that the device's memory requires")
      ->type_name("COMPONENT=FORMAT,… | auto");
  command
      .add_option("--name", flags.name,
                  "Name of this worker, unique among running workers; default: host and process id")
      ->type_name("NAME");
  command.add_option("--device", flags.device, "auto, cpu, cuda or cuda:N")->type_name("DEVICE");
  command.add_option("--dtype", flags.dtype, "auto (bf16 on a GPU, fp32 on a CPU), fp32 or bf16")->type_name("DTYPE");
  add_memory_flags(command, flags.memory);
  add_configuration_flags(command, flags.sources);
  command.footer(
      "SIGTERM, SIGINT and SIGHUP drain the worker: it hands back the units that have not started and finishes\n"
      "the others within worker.drain_ms. A second signal ends it immediately.");
  command.callback([kept, &invoked] {
    invoked = [kept] {
      const auto exit_code = serve(*kept);
      return exit_code ? *exit_code : report("run", exit_code.error());
    };
  });
}

}  // namespace ditfleet::worker
