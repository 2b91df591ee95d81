// `ditfleet generate`: submits a job, shows its steps, writes its pictures.
#pragma once

#include <string>
#include <vector>

#include "coordinator/cli/command.h"
#include "shared/job/flags.h"

namespace ditfleet::cli {

// As typed. The service fills in what was left out.
struct GenerateFlags {
  Target target;
  std::string model, out;
  std::vector<std::string> loras;  // NAME[:SCALE]
  job::FieldFlags fields;
};

// The body of POST /v1/jobs. kInvalidArgument names the flag: an -o with an unknown extension, a malformed --lora.
Result<std::string> job_body(const GenerateFlags& flags);

}  // namespace ditfleet::cli
