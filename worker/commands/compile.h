// `ditfleet-worker compile`: compiles the regions of a model ahead of time, without a GPU.
#pragma once

#include <string>

#include "shared/config/settings.h"
#include "worker/commands/command_line.h"

namespace ditfleet::worker {

struct CompileFlags {
  config::Sources sources;
  std::string model_dir;
  std::string architectures;  // "sm_80,sm_90a"; empty: all GPUs
  std::string dtype = "auto";
  std::string out;  // export file; empty: only the cache
  bool explain = false, json = false;
};

void add_compile_flags(CLI::App& command, CompileFlags& flags);
int compile(const CompileFlags& flags);

}  // namespace ditfleet::worker
