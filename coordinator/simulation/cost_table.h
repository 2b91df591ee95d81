// What things cost on the workers that a simulation pretends to have, read from a file that says where each figure
// was measured. The scheduler under simulation does not see it: it learns costs as it does in service.
#pragma once

#include <cstdint>
#include <string>

#include "shared/core/result.h"

namespace ditfleet::simulation {

struct CostTable {
  std::int64_t text_us = 0;       // text encoding of one image
  double step_us_per_token = 0;   // one denoising step: linear layers and what goes with them
  double step_us_per_token2 = 0;  // attention
  double adapter_step_ratio = 1;  // a step with an adapter to one without
  int text_tokens = 512;
  double vae_us_per_pixel = 0;
  std::int64_t cold_class_us = 0;  // a worker's first run of a shape
  double run_spread = 0;           // runs vary by ± this part

  std::int64_t adapter_bytes = 0;
  double adapter_load_bytes_per_s = 0;   // source → host memory, one after the other, beside the running job
  std::int64_t adapter_swap_us = 0;      // host memory → slot, beside the running job
  std::int64_t adapter_resident_us = 0;  // from one in a slot to another in a slot, between two jobs
  int adapter_slots = 0;
  std::int64_t host_adapter_bytes = 0;
  int lookahead = 2;  // units a worker holds, the running one included

  // One image on a warm worker that has its adapter in a slot, without spread.
  std::int64_t run_us(int width, int height, int steps, bool adapter) const;
};

// kNotFound: no such file. kInvalidArgument: what is wrong, what is missing or not known.
Result<CostTable> read_cost_table(const std::string& path);

}  // namespace ditfleet::simulation
