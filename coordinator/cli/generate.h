// `ditfleet generate`: submits a job, shows its progress and writes its images.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "coordinator/cli/command.h"
#include "shared/job/flags.h"

namespace ditfleet::cli {

// The flags as typed. The service sets missing fields to defaults.
struct GenerateFlags {
  Target target;
  std::string model, out;
  std::vector<std::string> loras;  // NAME[:SCALE[:EXPERT]]
  job::FieldFlags fields;
  std::optional<int> priority;
  std::optional<double> deadline_s;
  std::string idempotency_key;
  bool no_wait = false;
};

// The body of POST /v1/jobs. kInvalidArgument: an -o with an unknown extension, or a malformed --lora; the message
// contains the flag.
Result<std::string> job_body(const GenerateFlags& flags);

}  // namespace ditfleet::cli
