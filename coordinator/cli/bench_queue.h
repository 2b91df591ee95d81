// `ditfleet bench queue`: what the queue does on this machine, with workers that do nothing, against a
// private Redis of its own (append-only, everysec). tests/bench/README.md reads the figures.
#pragma once

#include <chrono>
#include <string>

namespace ditfleet::cli {

struct BenchQueueOptions {
  // all, or one of: yardstick (what a Function that does nothing costs on this machine), throughput (one shard, as fast
  // as it goes), shards (two shards), latency (idle system), memory (retention of 5 s, paced).
  std::string scenario = "all";
  std::chrono::seconds duration{60};  // of throughput and of shards
  int batch = 64;                     // jobs a Function call
  int workers = 4;                    // null workers a shard
  int window = 4096;                  // jobs under way a shard
  bool json = false;                  // one JSON object a figure instead of a table
  std::string csv;                    // append rows to this file; empty: none
  std::string appendfsync = "everysec";
  std::string revision = "unknown";  // for those rows
  std::string dir;                   // where Redis' files go, removed afterwards; empty: a folder in /tmp
};

// 0: measured; 1: something failed or the queue was left in a wrong state (said on stderr); 2: usage. SIGINT, SIGTERM,
// SIGHUP and SIGPIPE end the process as ever, after its Redis and that one's folder.
int run_bench_queue(const BenchQueueOptions& options);

}  // namespace ditfleet::cli
