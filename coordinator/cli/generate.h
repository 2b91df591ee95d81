// `ditfleet generate`: submits a job, shows its steps, writes its pictures.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/cli/command.h"

namespace ditfleet::cli {

// As typed; what was not is left to the service.
struct GenerateFlags {
  Target target;
  std::string prompt, model, size, out;
  std::vector<std::string> loras;  // NAME[:SCALE]
  std::optional<std::string> negative;
  std::optional<double> guidance, true_cfg;
  std::optional<std::int64_t> seed;
  std::optional<int> steps, count, max_sequence_length;
};

// The body of POST /v1/jobs. kInvalidArgument names the flag: an -o that is no picture, a broken --lora.
Result<std::string> job_body(const GenerateFlags& flags);

// "out.png" of 1 → "out.png"; of 3, the 2nd → "out-2.png" (`index` counts from 0).
std::string numbered_path(const std::string& path, int index, int count);

}  // namespace ditfleet::cli
