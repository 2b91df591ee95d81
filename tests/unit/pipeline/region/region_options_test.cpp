// Which mode a call runs in: compile.mode and compile.rules.
#include <gtest/gtest.h>

#include "pipeline/region/options.h"

namespace ditfleet::region {
namespace {

TEST(RegionOptions, TheFirstRuleThatHoldsSaysTheMode) {
  CompileOptions options;
  options.mode = "max-autotune";
  options.rules = {{.max_frames = 49, .max_tokens = 4096, .mode = "reduce-overhead"},
                   {.min_frames = 81, .mode = "none"},
                   {.mode = "default"}};
  EXPECT_EQ(mode_for(options, 4096, 1), Mode::kReduceOverhead);
  EXPECT_EQ(mode_for(options, 4096, 49), Mode::kReduceOverhead) << "bounds are inclusive";
  EXPECT_EQ(mode_for(options, 4097, 49), Mode::kDefault) << "both bounds must hold";
  EXPECT_EQ(mode_for(options, 4096, 50), Mode::kDefault);
  EXPECT_EQ(mode_for(options, 4096, 80), Mode::kDefault);
  EXPECT_EQ(mode_for(options, 1, 81), Mode::kNone);
  options.rules.pop_back();
  EXPECT_EQ(mode_for(options, 4096, 60), Mode::kMaxAutotune) << "where no rule holds it is compile.mode";
  options.rules.insert(options.rules.begin(), {.min_tokens = 10, .mode = "max-autotune-no-cudagraphs"});
  EXPECT_EQ(mode_for(options, 10, 1), Mode::kMaxAutotuneNoCudagraphs)
      << "the first wins, though a later one holds, too";
  EXPECT_EQ(mode_for(options, 9, 1), Mode::kReduceOverhead);
  EXPECT_EQ(mode_for({}, 4096, 1), Mode::kDefault);
}

TEST(RegionOptions, ModesHaveNamesAndParts) {
  EXPECT_EQ(parse_mode("none"), Mode::kNone);
  EXPECT_EQ(parse_mode("default"), Mode::kDefault);
  EXPECT_EQ(parse_mode("reduce-overhead"), Mode::kReduceOverhead);
  EXPECT_EQ(parse_mode("max-autotune-no-cudagraphs"), Mode::kMaxAutotuneNoCudagraphs);
  EXPECT_EQ(parse_mode("max-autotune"), Mode::kMaxAutotune);
  EXPECT_EQ(parse_mode("fast"), std::nullopt);
  EXPECT_TRUE(uses_graphs(Mode::kReduceOverhead) && uses_graphs(Mode::kMaxAutotune));
  EXPECT_FALSE(uses_graphs(Mode::kDefault) || uses_graphs(Mode::kMaxAutotuneNoCudagraphs) || uses_graphs(Mode::kNone));
}

}  // namespace
}  // namespace ditfleet::region
