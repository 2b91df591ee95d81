// The table of metrics and its series; a GPU's meter on a stand-in for NVML.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <stdexcept>

#include "shared/telemetry/metrics.h"
#include "tests/unit/process_metrics.h"
#include "worker/gpu_meter.h"

namespace ditfleet {
namespace {

using telemetry::MetricType;
using testing::series;

TEST(MetricTable, NamesFollowThePrometheusConventions) {
  std::set<std::string_view> names;
  for (const telemetry::MetricRow& row : telemetry::metric_table()) {
    SCOPED_TRACE(row.name);
    EXPECT_TRUE(names.insert(row.name).second);
    EXPECT_TRUE(row.name.starts_with("ditfleet_"));
    EXPECT_EQ(row.name.ends_with("_total"), row.type == MetricType::kCounter);
    EXPECT_EQ(row.buckets.empty(), row.type != MetricType::kHistogram);
    EXPECT_TRUE(std::is_sorted(row.buckets.begin(), row.buckets.end()));
    const std::string stem(row.name.substr(0, row.name.size() - (row.type == MetricType::kCounter ? 6 : 0)));
    if (!row.unit.empty()) {
      EXPECT_TRUE(stem.ends_with("_" + std::string(row.unit)));
    }
    EXPECT_FALSE(row.help.empty() || row.help.ends_with('.'));
    EXPECT_NE(row.panel.find('/'), std::string_view::npos);
  }
}

TEST(Series, NeedsTheTableAndItsLabels) {
  EXPECT_THROW(telemetry::Counters("ditfleet_made_up_total"), std::logic_error);
  EXPECT_THROW(telemetry::Gauges("ditfleet_jobs_total"), std::logic_error);
  const telemetry::Counters jobs("ditfleet_jobs_total");
  EXPECT_THROW(jobs(), std::logic_error);
  EXPECT_THROW(jobs({"a", "b"}), std::logic_error);
}

TEST(Series, AddsUp) {
  const telemetry::Counters waits("ditfleet_kernel_cache_waits_total"), same("ditfleet_kernel_cache_waits_total");
  const double before = same.total();
  waits({"a"}).Increment(2);
  waits({"b"}).Increment(3);
  EXPECT_EQ(same.total(), before + 5);
}

TEST(Series, BoundsTheValuesOfALabel) {
  const telemetry::Counters refusals("ditfleet_quota_refusals_total");
  for (int i = 0; i < 1000; ++i) refusals({"tenant" + std::to_string(i), "queued_units"}).Increment();
  const std::string name = "ditfleet_quota_refusals_total";
  EXPECT_EQ(series(name, {"tenant=\"tenant99\""}), 1);
  EXPECT_EQ(series(name, {"tenant=\"tenant100\""}), std::nullopt);
  EXPECT_EQ(series(name, {"tenant=\"other\""}), 900);
  refusals({"tenant99", "queued_units"}).Increment();
  EXPECT_EQ(series(name, {"tenant=\"tenant99\""}), 2);
}

TEST(GpuMeter, RecordsWhatNvmlMeasures) {
  EXPECT_EQ(worker::GpuMeter::open("cpu", 0, NVML_STAND_IN), nullptr);
  EXPECT_EQ(worker::GpuMeter::open("cuda:0", 0, "/nowhere/libnvidia-ml.so.1"), nullptr);
  EXPECT_EQ(worker::GpuMeter::open("cuda:7", 0, NVML_STAND_IN), nullptr) << "there is one GPU";
  const auto meter = worker::GpuMeter::open("cuda:0", 0, NVML_STAND_IN);
  ASSERT_NE(meter, nullptr);
  const auto first = meter->energy_j(), second = meter->energy_j();
  ASSERT_TRUE(first && second);
  EXPECT_DOUBLE_EQ(*second - *first, 5) << "each reading of the stand-in is 5000 mJ later";
  meter->record();
  meter->record();
  EXPECT_EQ(series("ditfleet_gpu_power_watts"), 350.5);
  EXPECT_EQ(series("ditfleet_gpu_memory_used_bytes"), 3e9);
  EXPECT_EQ(series("ditfleet_gpu_memory_bytes"), 80e9);
  EXPECT_EQ(series("ditfleet_gpu_energy_joules_total"), 5) << "since the first record()";
}

}  // namespace
}  // namespace ditfleet
