// The configuration as the pipeline takes it.
#pragma once

#include "pipeline/engine.h"
#include "shared/config/settings.h"
#include "shared/core/result.h"

namespace ditfleet::worker {

// compile.* alone.
region::CompileOptions compile_options(const config::Settings& settings);

// Device, precision, threads as configured (0: the engine's choice), compile.*, and the kernel cache unless blocks run
// eagerly. Errors: those of kernel_cache::open_cache. Blocks on the disk.
Result<pipeline::EngineOptions> engine_options(const config::Settings& settings);

}  // namespace ditfleet::worker
