// Plans the processes of `ditfleet up` and checks everything before the first one starts.
#pragma once

#include <string>
#include <vector>

#include "coordinator/cli/up/logged_process.h"
#include "shared/config/settings.h"
#include "shared/core/file_lock.h"
#include "shared/core/result.h"

namespace ditfleet::cli {

struct UpFlags {
  config::Sources sources;
  std::string listen, redis, data, device, dtype, ready_file;
  std::vector<std::string> models;                  // NAME=DIR
  std::string quantize;                             // of every model in `models`
  std::string offload, memory_limit, reserve_vram;  // empty: as configured
  int workers = -1;                                 // -1: as configured
  bool json = false;
};

struct UpPlan {
  config::Settings settings;                       // complete: port, models' folders, Redis' URL
  std::string gateway_url;                         // for clients on this host
  std::string data_dir, ready_file, redis_socket;  // redis_socket is empty with an external Redis
  FileLock data_lock, redis_lock;
  LoggedProcessSpec redis, coordinator;  // Redis' argv is empty with an external Redis
  std::vector<LoggedProcessSpec> workers;
  bool json = false;
};

// Reads the configuration, checks the models' folders, locks the data folder, picks the port and writes the files that
// the children read. Errors say what to change. Blocks on the disk, and up to 15 s while a Redis of an earlier run
// ends.
Result<UpPlan> plan_up(const UpFlags& flags);

}  // namespace ditfleet::cli
