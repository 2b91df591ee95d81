// `ditfleet bench queue`.
#include <memory>

#include "coordinator/cli/bench_queue.h"
#include "coordinator/cli/command.h"

namespace ditfleet::cli {

void add_bench(CLI::App& app, Invocation& run) {
  auto* bench = app.add_subcommand("bench", "Measure this machine");
  bench->require_subcommand(1);
  auto options = std::make_shared<BenchQueueOptions>();
  options->appendfsync.clear();
  auto seconds = std::make_shared<int>(60);
  auto sources = std::make_shared<config::Sources>();
  auto* queue = bench->add_subcommand("queue", "The job queue on a private Redis, with workers that do nothing");
  queue->add_option("--scenario", options->scenario, "What to measure")
      ->check(CLI::IsMember({"all", "yardstick", "latency", "throughput", "shards", "memory"}))
      ->capture_default_str();
  queue->add_option("--seconds", *seconds, "How long throughput and shards submit")
      ->check(CLI::Range(1, 3600))
      ->capture_default_str();
  queue->add_option("--batch", options->batch, "Jobs a Function call")
      ->check(CLI::Range(1, 128))
      ->capture_default_str();
  queue->add_option("--workers", options->workers, "Null workers a shard")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  queue->add_option("--window", options->window, "Jobs under way a shard")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  queue->add_option("--fsync", options->appendfsync, "Redis' appendfsync; by default redis.appendfsync")
      ->check(CLI::IsMember({"always", "everysec", "no"}));
  queue->add_option("--csv", options->csv, "Append the figures to this file")->type_name("FILE");
  queue->add_option("--revision", options->revision, "The revision those rows name")->capture_default_str();
  queue->add_option("--dir", options->dir, "Where Redis' files go; removed afterwards")->type_name("DIR");
  queue->add_flag("--json", options->json, "Print one JSON object a figure");
  add_configuration_flags(*queue, *sources);
  queue->callback([options, seconds, sources, &run] {
    options->duration = std::chrono::seconds(*seconds);
    run = [options, sources] {
      const auto settings = config::load(*sources);
      if (!settings) return report("bench queue", settings.error());
      if (options->appendfsync.empty()) options->appendfsync = settings->redis.appendfsync;
      return run_bench_queue(*options);
    };
  });
}

}  // namespace ditfleet::cli
