// Shared by the simulator's tests: the committed cost table, a short trace, files.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "coordinator/simulation/cost_table.h"
#include "coordinator/simulation/trace.h"
#include "shared/core/bytes.h"
#include "tests/paths.h"
#include "tests/sim/generate_trace.h"

namespace ditfleet::simulation {

inline CostTable costs() {
  auto table = read_cost_table(source_path("tests/sim/h200.json"));
  EXPECT_TRUE(table.ok()) << table.error().message;
  return *table;
}

inline Trace small_trace(std::uint64_t seed = 1) {
  TraceOptions options;
  options.jobs = 400;
  options.workers = 4;
  options.adapters = 60;
  options.seed = seed;
  return *generate_trace(options, costs());
}

inline std::string scratch(const std::string& name, const std::string& text) {
  const auto path = ::testing::TempDir() + name;
  EXPECT_TRUE(write_file_atomically(path, text).ok());
  return path;
}

}  // namespace ditfleet::simulation
