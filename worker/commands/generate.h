// `ditfleet-worker generate`: runs one request through the pipeline, without any service.
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

// Missing fields get the model's defaults.
struct GenerateFlags {
  config::Sources sources;
  std::string model_dir, out, dump;
  std::string device, dtype;  // empty: worker.device, worker.dtype
  job::FieldFlags fields;
  std::vector<std::string> loras;  // FILE[:SCALE]
};

void add_generate_flags(CLI::App& command, GenerateFlags& flags);
int generate(const GenerateFlags& flags);

// The complete and valid spec. kInvalidArgument: the message contains the flag.
Result<job::JobSpec> spec_of(const GenerateFlags& flags, const job::ModelEntry& model);

// Parses FILE or FILE:SCALE, such as "style.safetensors:0.7". The text after the last colon is the scale if it is a
// number and the file before it exists. Errors: kInvalidArgument (invalid scale, empty file name), kNotFound (no such
// file). The message contains the flag.
Result<pipeline::LoraRequest> lora_of(const std::string& text);

}  // namespace ditfleet::worker
