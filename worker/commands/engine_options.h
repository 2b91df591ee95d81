// Translates the configuration into the options of the pipeline.
#pragma once

#include "pipeline/engine.h"
#include "shared/config/settings.h"
#include "shared/core/result.h"
#include "worker/commands/command_line.h"
#include "worker/ranks/leader.h"

namespace ditfleet::worker {

// Converts compile.*.
region::CompileOptions compile_options(const config::Settings& settings);

// Converts all options and opens the kernel cache, unless compile.backend is eager. Errors: those of
// kernel_cache::open_cache(). Blocks on the disk.
Result<pipeline::EngineOptions> engine_options(const config::Settings& settings);
// The same with the device and the type that the flags name.
Result<pipeline::EngineOptions> engine_options(const config::Settings& settings, const ModelFlags& flags);

// Starts the other ranks of a worker with several GPUs, which create engines with `create`, too. Null with one GPU.
// Errors: those of RankProcesses::start().
Result<std::shared_ptr<RankProcesses>> start_ranks(const config::Settings& settings, const EngineFactory& create);
// The engine of all ranks, or of this process alone if `ranks` is null.
Result<std::unique_ptr<pipeline::Engine>> create_engine(const std::shared_ptr<RankProcesses>& ranks,
                                                        const EngineFactory& create);

// kInvalidArgument: the form of --quantize.
Result<pipeline::ModelSource> source_of(const ModelFlags& flags);

}  // namespace ditfleet::worker
