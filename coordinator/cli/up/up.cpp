// `ditfleet up`: one command runs a private Redis, the coordinator and the workers. `ditfleet workers start`.
#include "coordinator/cli/command.h"
#include "coordinator/cli/up/supervisor.h"
#include "coordinator/cli/up/up_plan.h"

namespace ditfleet::cli {

void add_up(CLI::App& app, Invocation& run) {
  auto flags = std::make_shared<UpFlags>();
  auto* command = app.add_subcommand("up", "Run a private Redis, the coordinator and the workers on this machine");
  add_configuration_flags(*command, flags->sources);
  command->add_option("--listen", flags->listen, "Address of the gateway; port 0 picks a free one (gateway.listen)")
      ->type_name("HOST:PORT");
  command->add_option("--redis", flags->redis, "Use this Redis instead of a private one (redis.url)")->type_name("URL");
  command->add_option("--data", flags->data, "Folder for Redis' files, logs and results (data.dir)")->type_name("DIR");
  command->add_option("--workers", flags->workers, "Number of workers (worker.count)")
      ->check(CLI::Range(0, kMostWorkers));
  command
      ->add_option("--scale", flags->scale,
                   "Give the running `ditfleet up` with this --data so many workers: starts more, or those that were "
                   "stopped, or sends some away")
      ->check(CLI::Range(0, kMostWorkers));
  command->add_option("--model", flags->models, "A model folder in the layout of diffusers; repeatable")
      ->type_name("NAME=DIR")
      ->allow_extra_args(false);
  command
      ->add_option("--quantize", flags->quantize,
                   "Quantize components of these models while they are loaded (models.NAME.quantize)")
      ->type_name("COMPONENT=FORMAT,… | auto");
  command->add_option("--offload", flags->offload, "What may leave a worker's device memory (memory.offload)")
      ->type_name("auto|none|model|block");
  command->add_option("--memory-limit", flags->memory_limit, "Most device memory of each worker (memory.limit)")
      ->type_name("GIB");
  command->add_option("--reserve-vram", flags->reserve_vram, "Device memory to leave free (memory.reserve)")
      ->type_name("GIB");
  command->add_option("--device", flags->device, "auto, cpu or cuda (worker.device)");
  command->add_option("--dtype", flags->dtype, "auto, fp32 or bf16 (worker.dtype)");
  command
      ->add_option("--ready-file", flags->ready_file,
                   "Write URLs and pids as JSON to this file once the service is ready")
      ->type_name("FILE");
  command->add_flag("--json", flags->json, "Print the same JSON once the service is ready");
  command->callback([flags, &run] {
    run = [flags] {
      if (flags->scale >= 0) {
        auto scaled = scale_running(*flags, std::to_string(flags->scale));
        return scaled ? kExitOk : report("up --scale", scaled.error());
      }
      auto plan = plan_up(*flags);
      if (!plan) return report("up", plan.error());
      return supervise(std::move(*plan));
    };
  });
}

void add_workers_start(CLI::App& app, Invocation& run) {
  auto more = std::make_shared<UpFlags>();
  auto count = std::make_shared<int>(1);
  auto* start =
      app.get_subcommand("workers")->add_subcommand("start", "Start workers of `ditfleet up` on this machine");
  start->footer("Those that were stopped come first. On other machines, run `ditfleet-worker run`.");
  start->add_option("count", *count, "How many")->check(CLI::Range(1, kMostWorkers))->capture_default_str();
  start->add_option("--data", more->data, "Folder of that `ditfleet up` (data.dir)")->type_name("DIR");
  start->callback([more, count, &run] {
    run = [more, count] {
      auto scaled = scale_running(*more, "+" + std::to_string(*count));
      return scaled ? kExitOk : report("workers start", scaled.error());
    };
  });
}

}  // namespace ditfleet::cli
