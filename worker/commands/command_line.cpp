#include "worker/commands/command_line.h"

#include <CLI/CLI.hpp>
#include <iostream>
#include <utility>

#include "shared/config/model_path.h"
#include "shared/core/sha256.h"
#include "shared/families/served.h"
#include "shared/job/validate.h"
#include "shared/telemetry/log.h"

namespace ditfleet::worker {

void add_configuration_flags(CLI::App& command, config::Sources& sources) {
  command.add_option("--config", sources.file, "YAML configuration (config/REFERENCE.md lists every key)")
      ->envname("DITFLEET_CONFIG")
      ->type_name("FILE");
  command
      .add_option("--set", sources.sets,
                  "Set one configuration key; overrides the environment and the file; repeatable")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
}

void add_model_folder(CLI::App& command, std::string& dir) {
  command.add_option("--model", dir, "Model folder in the diffusers layout, hf:ORG/NAME or known:NAME")
      ->required()
      ->type_name("DIR")
      ->transform([](std::string text) {
        const auto path = config::model_path(text);
        if (!path) throw CLI::ValidationError("--model", path.error().message);
        return *path;
      });
}

void add_weight_flags(CLI::App& command, WeightFlags& flags) {
  for (const std::string component : config::kFileComponents) {
    std::string flag = "--" + component;
    std::replace(flag.begin(), flag.end(), '_', '-');
    command
        .add_option_function<std::string>(
            flag, [&flags, component](const std::string& file) { flags.files[component] = file; },
            component == "transformer" ? "Its weights, in place of the folder's: safetensors or GGUF, in the names of "
                                         "diffusers, ComfyUI or the model's own code"
                                       : "The same for this component")
        ->type_name("FILE");
  }
  command
      .add_option("--quantize", flags.quantize,
                  "Quantize components while they are loaded: transformer to fp8 or nf4, text_encoder and "
                  "text_encoder_2 to nf4; auto: those that the device's memory requires")
      ->type_name("COMPONENT=FORMAT,… | auto");
  command.add_option("--attention", flags.attention, "fp8: self-attention in 8 bits (default: as the other parts)")
      ->type_name("fp8");
}

config::Sources MemoryFlags::over(config::Sources sources) const {
  for (const auto& [key, value] : {std::pair("offload", &offload), {"limit", &limit}, {"reserve", &reserve}})
    if (!value->empty()) sources.sets.push_back("memory." + std::string(key) + "=" + *value);
  return sources;
}

void add_memory_flags(CLI::App& command, MemoryFlags& flags) {
  command.add_option("--offload", flags.offload, "What may leave the device's memory (default auto)")
      ->type_name("auto|none|model|block");
  command.add_option("--memory-limit", flags.limit, "Most device memory that the worker may take")->type_name("GIB");
  command.add_option("--reserve-vram", flags.reserve, "Device memory to leave free")->type_name("GIB");
}

void add_model_flags(CLI::App& command, ModelFlags& flags) {
  add_model_folder(command, flags.dir);
  add_weight_flags(command, flags.weights);
  command.add_option("--dtype", flags.dtype, "auto (bf16 on a GPU, fp32 on a CPU), fp32 or bf16")->type_name("DTYPE");
  command.add_option("--vae-dtype", flags.vae_dtype, "Precision of the VAE: fp32 or bf16 (default: as --dtype)")
      ->type_name("DTYPE");
  command.add_option("--device", flags.device, "auto, cpu, cuda or cuda:N")->type_name("DEVICE");
  add_memory_flags(command, flags.memory);
  add_configuration_flags(command, flags.sources);
}

Result<config::Settings> settings_of(const config::Sources& sources) {
  auto settings = config::load(sources);
  if (!settings) return Error{Code::kInvalidArgument, settings.error().message, settings.error().param};
  if (auto log = telemetry::configure_log("ditfleet-worker", settings->log.level, settings->log.format); !log)
    return log.error();
  return settings;
}

Result<job::JobSpec> spec_of(job::FieldFlags fields, const std::string& out, const std::string& dir,
                             bool needs_pictures) {
  for (auto& [field, text] : fields) {
    if (field.row().type != job::FieldType::kImage) continue;
    std::string all;
    for (const std::string& name : job::files_of(text)) {
      auto file = sha256_of_file(name);
      if (!file) return Error{file.error().code, std::string(field.row().flag) + ": " + file.error().message, {}};
      all += (all.empty() ? "" : "\n") + file->sha256;
    }
    text = std::move(all);
  }
  auto model = families::read_model_entry("model", dir, families::served());
  if (!model) return model.error();
  for (auto& [field, limits] : model->fields)
    if (!needs_pictures && field.row().type == job::FieldType::kImage) limits.required = false;
  auto body = job::body_of(fields, "--out", out);
  if (!body) return body.error();
  auto parsed = job::parse_spec(json::value(std::move(*body)));
  if (!parsed) return job::name_the_flag(parsed.error());
  auto complete = job::complete_spec(std::move(*parsed), {{{model->name, *model}}, model->name},
                                     [](const auto&, const auto&) -> Result<std::string> { return std::string(); });
  if (!complete) return job::name_the_flag(complete.error());
  return complete;
}

int report(const std::string& command, const Result<void>& done) {
  if (done) return kExitOk;
  std::cerr << "ditfleet-worker " << command << ": " << done.error().message << "\n";
  return done.error().code == Code::kInvalidArgument ? kExitUsage : kExitFailure;
}

}  // namespace ditfleet::worker
