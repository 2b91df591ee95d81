// Plans the processes of `ditfleet up` and checks everything before the first one starts.
#pragma once

#include <string>
#include <vector>

#include "coordinator/cli/up/logged_process.h"
#include "shared/config/settings.h"
#include "shared/core/file_lock.h"
#include "shared/core/result.h"

namespace ditfleet::cli {

inline constexpr int kMostWorkers = 256;

struct UpFlags {
  config::Sources sources;
  std::string listen, redis, data, device, dtype, ready_file;
  std::vector<std::string> models;                  // NAME=DIR
  std::string quantize;                             // of every model in `models`
  std::string offload, memory_limit, reserve_vram;  // empty: as configured
  int workers = -1;                                 // -1: as configured
  int scale = -1;                                   // of the `up` that runs; -1: run a new one
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

// The process of worker `number`, from 1 on. kNotFound: ditfleet-worker is not installed.
Result<LoggedProcessSpec> worker_spec(const UpPlan& plan, int number);

// Changes the number of workers of the `ditfleet up` that runs with the data folder of these flags: "3", or "+1". Waits
// until it has taken note, at most 10 s. kNotFound: none runs there.
Result<void> scale_running(const UpFlags& flags, const std::string& change);
// Where scale_running() writes the change; the supervisor removes the file.
std::string scale_file(const std::string& data_dir);

}  // namespace ditfleet::cli
