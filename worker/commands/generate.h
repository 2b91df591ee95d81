// `ditfleet-worker generate`: one request through the pipeline, without any service.
#pragma once

#include <string>
#include <vector>

#include "pipeline/engine.h"
#include "shared/config/settings.h"
#include "shared/core/result.h"
#include "shared/job/catalogue.h"
#include "shared/job/flags.h"
#include "shared/job/spec.h"
#include "worker/commands/command_line.h"

namespace ditfleet::worker {

// As typed. Fields that were left out get the model's defaults.
struct GenerateFlags {
  config::Sources sources;
  std::string model_dir, out, dump;
  std::string device, dtype;  // empty: worker.device, worker.dtype
  job::FieldFlags fields;
  std::vector<std::string> loras;  // FILE[:SCALE]
};

void add_generate_flags(CLI::App& command, GenerateFlags& flags);
int generate(const GenerateFlags& flags);

// The complete, checked spec of what was typed. kInvalidArgument names the flag.
Result<job::JobSpec> spec_of(const GenerateFlags& flags, const job::ModelEntry& model);

// "style.safetensors:0.7" → that file at 0.7, "style.safetensors" at 1. What follows the last colon is the scale where
// it is a number and what is before it is there, else the whole is a file's name. All errors name the flag:
// kInvalidArgument for a scale that is none, or no file's name; kNotFound for a file that is not there, before anything
// is loaded.
Result<pipeline::LoraRequest> lora_of(const std::string& text);

}  // namespace ditfleet::worker
