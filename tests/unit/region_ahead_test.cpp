// What is said of programs that are compiled ahead of time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pipeline/region/ahead.h"

namespace ditfleet::region {
namespace {

TEST(RegionAhead, WarnsOfKernelsThatSpill) {
  const auto program = std::make_shared<kernel_cache::Entry>();
  program->kernels = {{.name = "fine", .registers = 40},
                      {.name = "norm_126_i64_v", .registers = 255, .spill_bytes = 16}};
  AheadReport report;
  report.regions.push_back({.name = "flux.double", .arch = "sm_80", .program = program});
  EXPECT_THAT(spill_warnings(report), ::testing::ElementsAre(::testing::HasSubstr(
                                          "kernel norm_126_i64_v of region flux.double for sm_80 spills 16 bytes")));
  program->kernels.pop_back();
  EXPECT_THAT(spill_warnings(report), ::testing::IsEmpty());
}

}  // namespace
}  // namespace ditfleet::region
