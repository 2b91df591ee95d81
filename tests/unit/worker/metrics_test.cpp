// The table of metrics and its series; a GPU's meter on a stand-in for NVML.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <array>
#include <ctime>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "shared/telemetry/metrics.h"
#include "shared/telemetry/process.h"
#include "tests/paths.h"
#include "tests/unit/shared/telemetry/process_metrics.h"
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
    EXPECT_TRUE(row.name.starts_with("ditfleet_") || row.name.starts_with("process_"));
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

TEST(Series, KeepsTheRecentlyUsedValuesOfALabel) {
  const telemetry::Counters refusals("ditfleet_quota_refusals_total"), same("ditfleet_quota_refusals_total");
  const std::string name = "ditfleet_quota_refusals_total";
  for (int i = 0; i < 1000; ++i) {
    same({"in use", "rate"}).Increment();
    refusals({"tenant" + std::to_string(i), i % 2 == 0 ? "queued_units" : "queued_jobs"}).Increment();
  }
  EXPECT_EQ(series(name, {"tenant=\"in use\""}), 1000);
  EXPECT_EQ(series(name, {"tenant=\"tenant900\""}), std::nullopt);
  EXPECT_EQ(series(name, {"tenant=\"tenant901\""}), 1);
  EXPECT_EQ(series(name, {"tenant=\"tenant999\""}), 1);
  EXPECT_EQ(refusals.total(), 2000) << "with what is no longer exported";
  EXPECT_FALSE(refusals.has({"tenant900", "queued_units"}));
  refusals({"tenant900", "queued_units"}).Increment();
  EXPECT_EQ(series(name, {"tenant=\"tenant900\""}), 1) << "starts again";
  EXPECT_EQ(series(name, {"tenant=\"tenant901\""}), std::nullopt) << "made room";
  // Under load from several threads: no series is used after its removal.
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 3000; ++i) refusals({std::to_string(i * 4 + t), "rate"}).Increment();
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(refusals.total(), 2001 + 12'000);
}

TEST(Process, ExportsItsState) {
  telemetry::show_build("1.2", "abc");
  EXPECT_EQ(series("ditfleet_build_info", {"revision=\"abc\"", "version=\"1.2\""}), 1);
  const double page = 4096, now = static_cast<double>(::time(nullptr));
  EXPECT_GT(series("process_resident_memory_bytes"), 100 * page);
  EXPECT_GT(series("process_virtual_memory_bytes"), series("process_resident_memory_bytes"));
  EXPECT_GT(series("process_start_time_seconds"), now - 3600);
  EXPECT_LT(series("process_start_time_seconds"), now + 2);
  EXPECT_EQ(series("process_threads"), 1);
  const auto fds = series("process_open_fds");
  ASSERT_GE(fds, 3);
  EXPECT_GT(series("process_max_fds"), *fds);
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  EXPECT_EQ(series("process_open_fds"), *fds + 2);
  for (const int fd : ends) ::close(fd);
  EXPECT_EQ(series("process_open_fds"), fds);
  const auto cpu = series("process_cpu_seconds_total");
  const auto busy_until = std::clock() + CLOCKS_PER_SEC / 10;
  while (std::clock() < busy_until) {
  }
  EXPECT_GT(series("process_cpu_seconds_total"), *cpu + 0.05);
  EXPECT_LT(series("process_cpu_seconds_total"), *cpu + 10);
}

TEST(GpuMeter, RecordsWhatNvmlMeasures) {
  EXPECT_EQ(worker::GpuMeter::open("cpu", 0, test_library("nvml_stand_in")), nullptr);
  EXPECT_EQ(worker::GpuMeter::open("cuda:0", 0, "/nowhere/libnvidia-ml.so.1"), nullptr);
  EXPECT_EQ(worker::GpuMeter::open("cuda:7", 0, test_library("nvml_stand_in")), nullptr) << "there is one GPU";
  const auto meter = worker::GpuMeter::open("cuda:0", 0, test_library("nvml_stand_in"));
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
