// `ditfleet-worker compile`: a model's regions compiled before any worker asks for them, without a GPU.
#pragma once

#include <string>

#include "shared/config/settings.h"
#include "worker/commands/command_line.h"

namespace ditfleet::worker {

struct CompileFlags {
  config::Sources sources;
  std::string model_dir;
  std::string architectures;  // "sm_80,sm_90a"; empty: all GPUs'
  std::string dtype = "auto";
  std::string out;  // an export file; empty: the cache alone
  bool explain = false, json = false;
};

void add_compile_flags(CLI::App& command, CompileFlags& flags);
int compile(const CompileFlags& flags);

}  // namespace ditfleet::worker
