// What is said of programs that are compiled ahead of time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pipeline/region/programs/ahead.h"

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

TEST(RegionAhead, RefusesAnUnknownArchitecture) {
  EXPECT_TRUE(check_architectures({"sm_80", "sm_120a", "cpu"}));
  for (const char* arch : {"sm_70", "sm_900", "gfx90a", ""}) {
    const auto checked = check_architectures({"sm_80", arch});
    ASSERT_FALSE(checked) << arch;
    EXPECT_EQ(checked.error().code, Code::kInvalidArgument);
    EXPECT_THAT(checked.error().message,
                ::testing::HasSubstr("it must be one of sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120a, cpu"));
  }
}

}  // namespace
}  // namespace ditfleet::region
