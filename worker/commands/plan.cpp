#include <CLI/CLI.hpp>
#include <array>
#include <cstdio>
#include <iostream>
#include <memory>

#include "pipeline/engine.h"
#include "shared/core/json.h"
#include "worker/commands/command_line.h"
#include "worker/commands/engine_options.h"
#include "worker/families.h"
#include "worker/models/request.h"

namespace ditfleet::worker {
namespace {

struct PlanFlags {
  ModelFlags model;
  job::FieldFlags fields;
  bool json = false;
};

bool has_limit(const pipeline::PlanReport& report) { return report.available < pipeline::kNoMemoryLimit; }

// Of a copy from host memory; 0 if it was not measured how fast they are.
double seconds_of(const pipeline::PlanReport& report, std::int64_t copied) {
  return report.bandwidth > 0 ? static_cast<double>(copied) / report.bandwidth : 0;
}

json::object as_json(const pipeline::PlanReport& report, const pipeline::Engine& engine) {
  const pipeline::MemoryNeeds& needs = report.needs;
  json::object quantize, root;
  for (const auto& [component, format] : report.quantize) quantize[component] = format;
  root["device"] = engine.device();
  root["device_name"] = engine.device_name();
  root["dtype"] = engine.precision();
  root["quantize"] = quantize;
  root["available_bytes"] = has_limit(report) ? json::value(report.available) : json::value();
  root["driver_bytes"] = report.driver;
  root["bytes"] = json::object{{"text_encoders", needs.text.bytes},
                               {"modulation", needs.modulation.bytes},
                               {"blocks", needs.blocks.bytes + needs.other_blocks},
                               {"other_weights", needs.fixed},
                               {"encode", needs.encode},
                               {"denoise", needs.denoise},
                               {"decode", needs.decode}};
  root["copy_bytes_per_second"] = report.bandwidth;
  json::array rejected;
  for (const auto& [plan, reason] : report.choice.rejected)
    rejected.push_back(json::object{{"plan", pipeline::name_of(plan)}, {"reason", reason}});
  root["rejected"] = std::move(rejected);
  root["mode"] = report.mode;
  root["plan"] = nullptr;
  if (const auto& plan = report.choice.plan) {
    const std::int64_t per_request = copied_per_request(needs, *plan), per_step = copied_per_step(needs, *plan);
    root["plan"] = json::object{{"name", pipeline::name_of(plan->kind)},
                                {"peak_bytes", plan->bytes},
                                {"blocks_resident_bytes", plan->keep_blocks},
                                {"copied_bytes_per_request", per_request},
                                {"copied_bytes_per_step", per_step},
                                {"copy_seconds_per_request", seconds_of(report, per_request)},
                                {"copy_seconds_per_step", seconds_of(report, per_step)}};
  }
  return root;
}

void print(const pipeline::PlanReport& report, const pipeline::Engine& engine) {
  const auto row = [](const std::string& name, const std::string& value) {
    std::cout << name << std::string(name.size() < 22 ? 22 - name.size() : 1, ' ') << value << "\n";
  };
  const auto bytes = [&](const std::string& name, std::int64_t value) { row(name, pipeline::bytes_text(value)); };
  const auto copies = [&](const std::string& name, std::int64_t copied) {
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, " (%.3f s)", seconds_of(report, copied));
    row(name, pipeline::bytes_text(copied) + seconds);
  };
  const pipeline::MemoryNeeds& needs = report.needs;
  row("device", engine.device() + " (" + engine.device_name() + "), " + engine.precision());
  std::string formats;
  for (const auto& [component, format] : report.quantize)
    formats += (formats.empty() ? "" : ", ") + component + " " + format;
  row("quantized on load", formats.empty() ? "nothing" : formats);
  row("available", has_limit(report) ? pipeline::bytes_text(report.available) : "no limit");
  if (report.driver > 0) bytes("driver", report.driver);
  std::cout << "\n";
  bytes("text encoders", needs.text.bytes);
  bytes("modulation", needs.modulation.bytes);
  bytes("blocks", needs.blocks.bytes + needs.other_blocks);
  bytes("other weights", needs.fixed);
  bytes("encoding", needs.encode);
  bytes("denoising", needs.denoise);
  bytes("decoding", needs.decode);
  std::cout << "\n";
  row("compile mode", report.mode);
  if (const auto& plan = report.choice.plan) {
    row("plan", std::string(pipeline::name_of(plan->kind)));
    bytes("peak", plan->bytes);
    bytes("blocks that stay", plan->keep_blocks);
    copies("copied per request", copied_per_request(needs, *plan));
    copies("copied per step", copied_per_step(needs, *plan));
  } else {
    row("plan", "none fits");
  }
  for (const auto& [plan, reason] : report.choice.rejected)
    row("not possible", std::string(pipeline::name_of(plan)) + ": " + reason);
}

// How videos of these numbers of frames would run, so that an operator sees which rules are needed (compile.rules).
constexpr std::array<int, 6> kFrames{1, 25, 49, 61, 81, 121};

using FramesPlans = std::vector<std::pair<int, pipeline::PlanReport>>;

Result<FramesPlans> plans_by_frames(pipeline::Engine& engine, const pipeline::ModelSource& source,
                                    pipeline::GenerationRequest request) {
  FramesPlans plans;
  for (const int frames : kFrames) {
    request.fields.set("frames", frames);
    auto report = engine.plan(source, request);
    if (!report) return report.error();
    plans.emplace_back(frames, std::move(*report));
  }
  return plans;
}

void print(const FramesPlans& plans) {
  std::printf("\n%8s %-28s%-10s%12s%18s\n", "frames", "compile mode", "plan", "peak", "copied per step");
  for (const auto& [frames, report] : plans) {
    const auto& plan = report.choice.plan;
    std::printf("%8d %-28s%-10s%12s%18s\n", frames, report.mode.c_str(),
                plan ? pipeline::name_of(plan->kind).data() : "none fits",
                plan ? pipeline::bytes_text(plan->bytes).c_str() : "",
                plan ? pipeline::bytes_text(copied_per_step(report.needs, *plan)).c_str() : "");
  }
}

Result<void> run(PlanFlags flags) {
  auto settings = settings_of(flags.model.memory.over(flags.model.sources));
  if (!settings) return settings.error();
  flags.fields.try_emplace(job::Field("prompt"), "a");
  auto spec = spec_of(flags.fields, "", flags.model.dir, /*needs_pictures=*/false);
  if (!spec) return spec.error();
  auto source = source_of(flags.model);
  if (!source) return source.error();
  auto options = engine_options(*settings, flags.model);
  if (!options) return options.error();
  auto engine = pipeline::Engine::create(*options, families());
  if (!engine) return engine.error();
  auto report = (*engine)->plan(*source, request_of(*spec, 0));
  if (!report) return job::name_the_flag(report.error());
  FramesPlans by_frames;
  if (spec->fields.integer("frames").value_or(1) > 1) {
    auto plans = plans_by_frames(**engine, *source, request_of(*spec, 0));
    if (!plans) return plans.error();
    by_frames = std::move(*plans);
  }
  if (flags.json) {
    json::object root = as_json(*report, **engine);
    json::array rows;
    for (const auto& [frames, plan] : by_frames) {
      json::object made = as_json(plan, **engine);
      rows.push_back(json::object{{"frames", frames}, {"mode", made["mode"]}, {"plan", made["plan"]}});
    }
    if (!rows.empty()) root["by_frames"] = std::move(rows);
    std::cout << json::serialize(root) << "\n";
  } else {
    print(*report, **engine);
    std::cout.flush();
    if (!by_frames.empty()) print(by_frames);
    std::fflush(stdout);
  }
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
  add_model_flags(command, flags.model);
  job::add_field_flags(command, flags.fields, false, /*needs_prompt=*/false);
  command.add_flag("--json", flags.json, "Print one JSON object; sizes in bytes");
  command.footer(
      "Reads the model's configuration and the headers of its weights, and loads nothing. Exit code 1: no plan fits.\n"
      "Copies run beside the computation: a step takes the longer time of the two.");
  command.callback([kept, &invoked] { invoked = [kept] { return report("plan", run(*kept)); }; });
}

}  // namespace ditfleet::worker
