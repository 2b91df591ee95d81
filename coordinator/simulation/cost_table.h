// The costs of the simulated workers, read from a file that states the source of each figure. The scheduler does not
// have access to them: it learns costs from observed runs, as in the service.
#pragma once

#include <cstdint>
#include <string>

#include "shared/core/result.h"

namespace ditfleet::simulation {

struct CostTable {
  std::int64_t text_us = 0;       // text encoding of one image
  double step_us_per_token = 0;   // of a denoising step: linear layers, norms
  double step_us_per_token2 = 0;  // of a denoising step: attention
  double adapter_step_ratio = 1;  // step with an adapter ÷ step without
  int text_tokens = 512;
  double vae_us_per_pixel = 0;
  std::int64_t cold_class_us = 0;  // added to a worker's first run of a shape
  double run_spread = 0;           // runs vary by ± this share

  std::int64_t adapter_bytes = 0;
  double adapter_load_bytes_per_s = 0;   // from source to host memory, one at a time, during the running job
  std::int64_t adapter_swap_us = 0;      // from host memory to a slot, during the running job
  std::int64_t adapter_resident_us = 0;  // switch between adapters in slots, between two jobs
  int adapter_slots = 0;
  std::int64_t host_adapter_bytes = 0;
  int lookahead = 2;  // units a worker holds, including the running one

  // One image on a warm worker with the adapter in a slot, without spread.
  std::int64_t run_us(int width, int height, int steps, bool adapter) const;
};

// kNotFound: no such file. kInvalidArgument: a field is missing, unknown or out of range.
Result<CostTable> read_cost_table(const std::string& path);

}  // namespace ditfleet::simulation
