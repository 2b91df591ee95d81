// A VAE's decoder with random weights, for tests and benches.
#pragma once

#include "pipeline/device/device.h"
#include "pipeline/nn/vae/config.h"
#include "pipeline/nn/vae/slots.h"

namespace ditfleet::pipeline::testing {

// FLUX.1's.
VaeConfig flux_vae_config();

// The same values, which bf16 holds exactly, for every device and element type; pictures neither vanish nor explode.
VaeSlots random_vae_slots(const VaeConfig& config, Placement placement, std::uint64_t seed = 0);

}  // namespace ditfleet::pipeline::testing
