// What is counted of compiled programs, and their spans: a program that the kernel cache had is no compile.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pipeline/region/compile/cached.h"
#include "pipeline/region/counters.h"
#include "pipeline/region/programs/fixed_program.h"
#include "shared/kernel_cache/cache.h"
#include "shared/telemetry/spans.h"
#include "tests/unit/shared/telemetry/process_metrics.h"

namespace ditfleet::region {
namespace {

using ditfleet::testing::series;
using std::chrono::microseconds;

TEST(RegionCounters, CountOnlyWhatWasCompiledHere) {
  RegionCounters counters;
  counters.program_took("made_up", "first", true, microseconds(7));
  counters.program_took("made_up", "first", false, microseconds(5));
  counters.program_took("made_up", "shape", false, microseconds(5));
  EXPECT_EQ(series("ditfleet_region_compiles_total", {"made_up", "first"}), 1);
  EXPECT_EQ(series("ditfleet_region_compiles_total", {"made_up", "shape"}).value_or(0), 0) << "the cache had it";
  EXPECT_EQ(series("ditfleet_region_program_seconds_count", {"made_up", "cache"}), 2);
  EXPECT_EQ(counters.counts().built, 1u);
  EXPECT_EQ(counters.counts().compile_us, 7u);
}

TEST(RegionCounters, AreThereBeforeTheirFirstEvent) {
  RegionCounters counters;
  counters.show("idle");
  for (const char* reason : {"first", "shape", "dtype", "device"})
    EXPECT_EQ(series("ditfleet_region_compiles_total", {"idle", reason}), 0) << reason;
  for (const char* source : {"compiled", "cache"})
    EXPECT_EQ(series("ditfleet_region_program_seconds_count", {"idle", source}), 0) << source;
  EXPECT_EQ(series("ditfleet_recompiles_total"), 0);
  EXPECT_EQ(series("ditfleet_region_variants_total"), 0);
  for (const char* reason :
       {"no_compiler", "unsupported_device", "unsupported_op", "compile_error", "recompile_limit", "adapters"})
    EXPECT_EQ(series("ditfleet_region_fallbacks_total", {reason}), 0) << reason;
  counters.recompiled("flux.single", "it is made up");
  EXPECT_EQ(series("ditfleet_recompiles_total"), 1);
}

class Spans : public telemetry::SpanSink {
 public:
  Spans() { telemetry::set_span_sink(this); }
  ~Spans() override { telemetry::set_span_sink(nullptr); }
  void take(telemetry::Span span) noexcept override { taken.push_back(std::move(span)); }
  std::vector<telemetry::Span> taken;
};

class MadeUpCompiler : public Compiler {
 public:
  std::string_view name() const override { return "made_up"; }
  kernel_cache::Kind output_kind() const override { return kernel_cache::Kind::kCubin; }
  std::string identity() const override { return "made up"; }
  std::string target(const std::string& arch) const override { return arch; }
  std::vector<std::string> options(const std::string&) const override { return {}; }
  Result<Entry> compile(const std::string& region, const Source&, const std::string& arch) const override {
    Entry entry;
    entry.region = region;
    entry.arch = arch;
    return entry;
  }
};

// A GPU's fixed programs go the way of the blocks'.
TEST(RegionCounters, AFixedProgramIsCompiledOnceUnderASpan) {
  Spans spans;
  const auto cache = make_memory_cache();
  const FixedProgram program{.name = "copies", .source = {}};
  {
    telemetry::ContextScope scope(telemetry::SpanContext::fresh());
    for (const bool first : {true, false}) {
      const auto made = compile_cached(*cache, key_of(program, MadeUpCompiler(), "sm_90a"), program.name,
                                       program.source, MadeUpCompiler(), "sm_90a");
      ASSERT_TRUE(made.ok());
      EXPECT_EQ(made->compiled, first);
    }
  }
  std::vector<std::string> names;
  for (const auto& span : spans.taken) names.push_back(span.name);
  ASSERT_THAT(names, ::testing::ElementsAre("region_compile", "kernel_cache_lookup", "kernel_cache_lookup"));
  EXPECT_EQ(spans.taken[0].parent_id, spans.taken[1].span_id);
  EXPECT_THAT(spans.taken[0].attributes,
              ::testing::Contains(std::pair<std::string, telemetry::AttributeValue>("ditfleet.region", "copies")));
}

}  // namespace
}  // namespace ditfleet::region
