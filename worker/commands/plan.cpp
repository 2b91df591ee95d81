#include <CLI/CLI.hpp>
#include <iostream>
#include <limits>
#include <memory>

#include "pipeline/engine.h"
#include "shared/core/json.h"
#include "shared/families/served.h"
#include "worker/commands/command_line.h"
#include "worker/commands/engine_options.h"
#include "worker/families.h"
#include "worker/units/request.h"

namespace ditfleet::worker {
namespace {

struct PlanFlags {
  config::Sources sources;
  MemoryFlags memory;
  std::string model_dir, transformer, quantize, device, dtype;
  job::FieldFlags fields;
  bool json = false;
};

constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max() / 8;

json::object as_json(const pipeline::PlanReport& report, const pipeline::Engine& engine) {
  const pipeline::MemoryNeeds& needs = report.needs;
  json::object quantize, root;
  for (const auto& [component, format] : report.quantize) quantize[component] = format;
  root["device"] = engine.device();
  root["device_name"] = engine.device_name();
  root["dtype"] = engine.precision();
  root["quantize"] = quantize;
  root["available_bytes"] = report.available < kUnlimited ? json::value(report.available) : json::value();
  root["driver_bytes"] = report.driver;
  root["bytes"] = json::object{{"text_encoders", needs.text.bytes},
                               {"modulation", needs.modulation.bytes},
                               {"blocks", needs.blocks.bytes},
                               {"other_weights", needs.fixed},
                               {"encode", needs.encode},
                               {"denoise", needs.denoise},
                               {"decode", needs.decode}};
  root["copy_bytes_per_second"] = report.bandwidth;
  json::array rejected;
  for (const std::string& reason : report.choice.rejected) {
    const auto colon = reason.find(": ");
    rejected.push_back(json::object{{"plan", reason.substr(0, colon)}, {"reason", reason.substr(colon + 2)}});
  }
  root["rejected"] = std::move(rejected);
  root["plan"] = nullptr;
  if (const auto& plan = report.choice.plan) {
    const std::int64_t per_request =
        (plan->keep_text ? 0 : needs.text.bytes) + (plan->keep_modulation ? 0 : needs.modulation.bytes);
    const std::int64_t per_step = needs.passes * (needs.blocks.bytes - plan->keep_blocks);
    root["plan"] = json::object{
        {"name", plan->name},
        {"peak_bytes", plan->bytes},
        {"blocks_resident_bytes", plan->keep_blocks},
        {"copied_bytes_per_request", per_request},
        {"copied_bytes_per_step", per_step},
        {"copy_seconds_per_request", report.bandwidth > 0 ? static_cast<double>(per_request) / report.bandwidth : 0},
        {"copy_seconds_per_step", report.bandwidth > 0 ? static_cast<double>(per_step) / report.bandwidth : 0}};
  }
  return root;
}

void print(const pipeline::PlanReport& report, const pipeline::Engine& engine) {
  const auto row = [](const std::string& name, const std::string& value) {
    std::cout << name << std::string(name.size() < 22 ? 22 - name.size() : 1, ' ') << value << "\n";
  };
  const auto bytes = [&](const std::string& name, std::int64_t value) { row(name, pipeline::bytes_text(value)); };
  const auto seconds = [&](std::int64_t copied) {
    char text[64];
    std::snprintf(text, sizeof text, "%s (%.3f s)", pipeline::bytes_text(copied).c_str(),
                  report.bandwidth > 0 ? static_cast<double>(copied) / report.bandwidth : 0);
    return std::string(text);
  };
  const pipeline::MemoryNeeds& needs = report.needs;
  row("device", engine.device() + " (" + engine.device_name() + "), " + engine.precision());
  std::string formats;
  for (const auto& [component, format] : report.quantize)
    formats += (formats.empty() ? "" : ", ") + component + " " + format;
  row("quantized on load", formats.empty() ? "nothing" : formats);
  row("available", report.available < kUnlimited ? pipeline::bytes_text(report.available) : "no limit");
  if (report.driver > 0) bytes("driver", report.driver);
  std::cout << "\n";
  bytes("text encoders", needs.text.bytes);
  bytes("modulation", needs.modulation.bytes);
  bytes("blocks", needs.blocks.bytes);
  bytes("other weights", needs.fixed);
  bytes("encoding", needs.encode);
  bytes("denoising", needs.denoise);
  bytes("decoding", needs.decode);
  std::cout << "\n";
  if (const auto& plan = report.choice.plan) {
    row("plan", plan->name);
    bytes("peak", plan->bytes);
    bytes("blocks that stay", plan->keep_blocks);
    row("copied per request",
        seconds((plan->keep_text ? 0 : needs.text.bytes) + (plan->keep_modulation ? 0 : needs.modulation.bytes)));
    row("copied per step", seconds(needs.passes * (needs.blocks.bytes - plan->keep_blocks)));
  } else {
    row("plan", "none fits");
  }
  for (const std::string& reason : report.choice.rejected) row("not possible", reason);
}

Result<void> run(PlanFlags flags) {
  auto settings = settings_of(flags.memory.over(flags.sources));
  if (!settings) return settings.error();
  auto entry = families::read_model_entry("model", flags.model_dir, families::served());
  if (!entry) return entry.error();
  flags.fields.try_emplace(job::Field("prompt"), "a");
  auto spec = spec_of(flags.fields, "", *entry);
  if (!spec) return spec.error();
  auto quantize = config::parse_quantize(flags.quantize);
  if (!quantize) return quantize.error();
  auto options = engine_options(*settings);
  if (!options) return options.error();
  if (!flags.device.empty()) options->device = flags.device;
  if (!flags.dtype.empty()) options->dtype = flags.dtype;
  auto engine = pipeline::Engine::create(*options, families());
  if (!engine) return engine.error();
  auto report = (*engine)->plan({"model", flags.model_dir, flags.transformer, *quantize}, request_of(*spec, 0));
  if (!report) return job::name_the_flag(report.error());
  if (flags.json)
    std::cout << json::serialize(as_json(*report, **engine)) << "\n";
  else
    print(*report, **engine);
  std::cout.flush();
  if (!std::cout) return internal_error("cannot write to standard output");
  if (!report->choice.plan) {
    return Error{Code::kOutOfMemory,
                 pipeline::budget_text(report->needs, report->choice, report->available) +
                     "; use --quantize auto, a smaller size, or more memory",
                 {}};
  }
  return {};
}

}  // namespace

void add_plan(CLI::App& app, Invocation& invoked) {
  auto& command = *app.add_subcommand("plan", "Show how a request would run in the device's memory");
  const auto kept = std::make_shared<PlanFlags>();
  PlanFlags& flags = *kept;
  command.add_option("--model", flags.model_dir, "Model folder in the diffusers layout")->required()->type_name("DIR");
  add_weight_flags(command, flags.transformer, flags.quantize);
  job::add_field_flags(command, flags.fields, false, /*needs_prompt=*/false);
  command.add_option("--dtype", flags.dtype, "auto (bf16 on a GPU, fp32 on a CPU), fp32 or bf16")->type_name("DTYPE");
  command.add_option("--device", flags.device, "auto, cpu, cuda or cuda:N")->type_name("DEVICE");
  add_memory_flags(command, flags.memory);
  command.add_flag("--json", flags.json, "Print one JSON object; sizes in bytes");
  add_configuration_flags(command, flags.sources);
  command.footer(
      "Reads the model's configuration and the headers of its weights, and loads nothing. Exit code 1: no plan fits.\n"
      "Copies run beside the computation: a step takes the longer time of the two.");
  command.callback([kept, &invoked] { invoked = [kept] { return report("plan", run(*kept)); }; });
}

}  // namespace ditfleet::worker
